// The processor's end of a ping-pong with a device, for `bench doorbell`: answers every number that
// appears in one word with the same number in another, and notes when. Both words may lie in memory
// that another process or a device shares.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace dflash::measure {

struct BellEcho {
  uint32_t* ring = nullptr;    // the device writes; only read here
  uint32_t* answer = nullptr;  // written here
  uint32_t first = 1, num_rounds = 1;
  int64_t timeout_ns = 0;  // of all rounds
};

// When each round's number was seen, by now_ns(); fewer than `num_rounds` where the time was over.
// Numbers come in turn, none left out.
std::vector<int64_t> answer_bells(const BellEcho& echo);

}  // namespace dflash::measure
