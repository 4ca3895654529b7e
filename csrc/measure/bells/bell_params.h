// The parameter of the one kernel that measures a doorbell, which is the same for nvcc, hipcc and
// the simulator.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::measure {

// The device stores a number to one word of the host's memory and waits for it in another.
struct BellParams {
  uint32_t* ring;          // the device writes it
  const uint32_t* answer;  // the processor writes it
  uint32_t* num_done;      // in device memory: how many answers came
  uint64_t budget_ns;      // for all rounds together
  uint32_t first;          // the number of the first round
  uint32_t num_rounds;
};
static_assert(sizeof(BellParams) == 40 && offsetof(BellParams, num_rounds) == 36);
inline constexpr uint32_t kBellThreads = 64;

}  // namespace dflash::measure
