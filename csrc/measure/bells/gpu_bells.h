// What a doorbell costs on a host's device (`bench.lab doorbell`), rung as device steps ring: a
// kernel stores to a processor and polls for its answer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>

#include "cards/gpu_host.h"
#include "cards/kernel_entries.h"
#include "measure/bells/bell_params.h"

namespace dflash::measure {

// The table of the kernels that measure; there is only one.
inline constexpr compute::gpu::KernelId kRingBells{0};
inline constexpr compute::gpu::KernelEntry kBellKernels[] = {
    {"dflash_ring_bells", sizeof(BellParams), 0}
};

// A ping-pong of `num_rounds` rounds, numbered from `first` on.
struct BellPlan {
  // Addresses as map_memory gave them. The answer to a number is the same number.
  uint32_t* ring = nullptr;
  const uint32_t* answer = nullptr;
  uint32_t first = 1, num_rounds = 1;
  std::chrono::nanoseconds budget{};  // for all rounds together
};

class GpuBells {
 public:
  // `host` must have the kernels of kBellKernels; it must outlive this object.
  explicit GpuBells(compute::gpu::GpuHost& host);
  ~GpuBells();
  GpuBells(const GpuBells&) = delete;
  GpuBells& operator=(const GpuBells&) = delete;

  // Rings as planned, on the calling thread, and returns how many rounds were answered in time.
  // Errors: those of the device. A device that does not end in spite of the budget counts as hung.
  Result<uint32_t> ring(const BellPlan& plan);

 private:
  using Turn = compute::gpu::GpuHost::Turn;
  Status reserve(const Turn& turn);
  Result<uint32_t> ring_by_kernel(const BellPlan& plan, const Turn& turn);

  compute::gpu::GpuHost& host_;
  std::byte* memory_ = nullptr;  // a word in the device's memory
  std::byte* mirror_ = nullptr;  // its copy in pinned memory
};

}  // namespace dflash::measure
