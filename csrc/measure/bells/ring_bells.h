// Rings a processor and waits for its answer, round after round. It shows what a doorbell in the
// host's memory costs with nothing else in between. Its loads, stores and bound are those of the
// kernels of device steps (pack_requests.h, await_replies.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"
#include "measure/bells/bell_params.h"

namespace dflash::measure {

using namespace compute::gpu;  // the names of portable.h

// One thread of one block works. The launch has more because blocks are multiples of 64 threads.
GPU_KERNEL(dflash_ring_bells, BellParams, kBellThreads) {
  if (thread_index() != 0) return;
  const uint64_t started_ns = device_ns();
  uint32_t num_done = 0;
  for (bool is_late = false; num_done < params.num_rounds && !is_late;) {
    const uint32_t value = params.first + num_done;
    store_release_system(params.ring, value);
    bool is_answered = load_acquire_system(params.answer) == value;
    while (!is_answered && !is_late) {
      is_late = device_ns() - started_ns > params.budget_ns;
      is_answered = load_acquire_system(params.answer) == value;
    }
    if (is_answered) ++num_done;
  }
  *params.num_done = num_done;
}

}  // namespace dflash::measure
