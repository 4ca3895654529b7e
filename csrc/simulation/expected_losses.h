// Which workers the host must give up, and by when: the checker's side of liveness. It knows what
// was broken and measures the time in which the host looked, and nothing of how the client judges.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace dflash::simulation {

class ExpectedLosses {
 public:
  struct Expected {
    std::string why;
    // Whether the worker is given up, or need not be any more.
    std::function<bool()> is_met;
    // Whether time in which the host looks counts at present.
    std::function<bool()> counts;
    std::function<int64_t()> within_ns;
  };
  void add(Expected expected) { all_.push_back({std::move(expected), 0}); }
  // The host has looked for so long. Returns what is late, each once.
  std::vector<std::string> check(int64_t looked_ns);

 private:
  struct Counted {
    Expected expected;
    int64_t looked_ns;
  };
  std::vector<Counted> all_;
};

inline std::vector<std::string> ExpectedLosses::check(int64_t looked_ns) {
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
