// The parameter of the one kernel that measures a doorbell: the same for nvcc, hipcc and the
// simulator.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::measure {

// The device stores a number to one word of the host's memory and waits for it in another.
struct BellParams {
  uint32_t* ring;          // the device writes
  const uint32_t* answer;  // the processor writes
  uint32_t* num_done;      // device memory: answers that came
  uint64_t budget_ns;      // of all rounds
  uint32_t first;          // number of the first round
  uint32_t num_rounds;
};
static_assert(sizeof(BellParams) == 40 && offsetof(BellParams, num_rounds) == 36);
inline constexpr uint32_t kBellThreads = 64;

}  // namespace dflash::measure
