// The processor's end of a device's ping-pong, for `bench.lab doorbell`. It answers every number
// that appears in one word with the same number in another, and notes when. Both words may lie in
// memory that another process or a device shares.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace dflash::measure {

struct BellEcho {
  uint32_t* ring = nullptr;    // the device writes it, this end only reads
  uint32_t* answer = nullptr;  // this end writes it
  uint32_t first = 1, num_rounds = 1;
  int64_t timeout_ns = 0;  // for all rounds together
};

// Returns when each round's number was seen, by now_ns(). There are fewer than `num_rounds` if the
// time was over. Numbers come in turn, with none left out.
std::vector<int64_t> answer_bells(const BellEcho& echo);

}  // namespace dflash::measure
