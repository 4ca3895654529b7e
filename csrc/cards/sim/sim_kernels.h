// What the simulator runs instead of a vendor's module: kernels as functions, in the order of a
// table.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "cards/kernel_entries.h"
#include "cards/sim/block.h"

namespace dflash::compute::gpu::sim {

struct Module {
  KernelTable entries;
  std::span<const Kernel> functions;  // one per entry
};

// For such a list of functions: a kernel's body with its parameter as the simulator passes it.
template <class Params, void (*kBody)(const Params&)>
void call(const void* params) {
  kBody(*static_cast<const Params*>(params));
}

Module expert_module();  // of expert_kernels()

}  // namespace dflash::compute::gpu::sim
