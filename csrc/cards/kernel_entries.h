// The kernels of one image as the host knows them: a runtime is made with such a table, finds each
// kernel by its name and launches it by its place. For host code only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dflash::compute::gpu {

enum class KernelId : uint16_t;  // a place in the runtime's table

struct KernelEntry {
  const char* name;        // the symbol in the module
  size_t params_bytes;     // of its one parameter
  uint32_t dynamic_bytes;  // shared memory beyond what its code declares, part of every launch
};
using KernelTable = std::span<const KernelEntry>;

inline const KernelEntry& entry_of(KernelTable kernels, KernelId kernel) {
  return kernels[static_cast<uint16_t>(kernel)];
}

// Those of kernel_table.h, in its order.
KernelTable expert_kernels();

}  // namespace dflash::compute::gpu
