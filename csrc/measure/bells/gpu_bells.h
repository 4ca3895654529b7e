// What a doorbell costs on a host's device, by each way in which a device can ring a processor and
// wait for it (`bench.lab doorbell`). Device steps use the first way only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "cards/gpu_host.h"
#include "measure/bells/queue_words.h"

namespace dflash::measure {

// How the device rings; the values are those of bells_abi.h.
enum class BellKind : uint8_t {
  kKernel = 0,  // a kernel stores and polls
  kStream = 1,  // the queue itself stores and waits
  kCall = 2,    // the queue calls the host and uses no words
};

// A ping-pong of `num_rounds` rounds, numbered from `first` on.
struct BellPlan {
  // Addresses as map_memory gave them. The answer to a number is the same number.
  uint32_t* ring = nullptr;
  const uint32_t* answer = nullptr;
  // For kStream, the answer's word as the host may write it, to end a wait whose answer never
  // comes.
  uint32_t* release = nullptr;
  uint32_t first = 1, num_rounds = 1;
  std::chrono::nanoseconds budget{};  // for all rounds together
};

struct BellOutcome {
  // Rounds that were answered in time; for kStream, whole batches of them.
  uint32_t num_done = 0;
  std::vector<int64_t> calls_ns;  // for kCall, when each call was made, by the steady clock
};

class GpuBells {
 public:
  // `host` must have the kernels of bell_kernels.h; it and `words` must outlive this object.
  GpuBells(compute::gpu::GpuHost& host, QueueWords& words);
  ~GpuBells();
  GpuBells(const GpuBells&) = delete;
  GpuBells& operator=(const GpuBells&) = delete;

  // Rings as planned, on the calling thread. Errors: kUnsupported where the driver has no such way,
  // and those of the device. A device that does not end in spite of the budget counts as hung.
  Result<BellOutcome> ring(const BellPlan& plan, BellKind kind);

 private:
  struct Calls;
  using Turn = compute::gpu::GpuHost::Turn;
  Status reserve(const Turn& turn);
  Result<BellOutcome> ring_by_kernel(const BellPlan& plan, const Turn& turn);
  Result<BellOutcome> ring_by_stream(const BellPlan& plan, const Turn& turn);
  Result<BellOutcome> ring_by_calls(const BellPlan& plan, const Turn& turn);
  Error hung(const Turn& turn);

  compute::gpu::GpuHost& host_;
  QueueWords& words_;
  std::byte* memory_ = nullptr;  // a word in the device's memory
  std::byte* mirror_ = nullptr;  // its copy in pinned memory
  std::unique_ptr<Calls> calls_;
};

}  // namespace dflash::measure
