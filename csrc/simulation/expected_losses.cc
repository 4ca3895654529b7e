// SPDX-License-Identifier: Apache-2.0
#include "simulation/expected_losses.h"

namespace dflash::simulation {

std::vector<std::string> ExpectedLosses::check(int64_t looked_ns) {
  std::vector<std::string> late;
  std::erase_if(all_, [&](Counted& one) {
    if (one.expected.is_met()) return true;
    if (one.expected.counts()) one.looked_ns += looked_ns;
    if (one.looked_ns <= one.expected.within_ns()) return false;
    late.push_back(one.expected.why + ", and the host has not given it up after " +
                   std::to_string(one.looked_ns / 1'000'000) + " ms");
    return true;
  });
  return late;
}

}  // namespace dflash::simulation
