// How long an idle thread spins for its next work before it sleeps. While a model decodes, work
// comes once a layer, and the pause is what the other side needs for its part of the layer, mostly
// a few hundred microseconds. A thread that sleeps then is woken in every layer, which takes 30 to
// 50 us on a virtual core that was halted. So the time is learned from the pauses.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace dflash {

// Belongs to one thread.
class IdleSpin {
 public:
  // Spins for `least_ns` at least, and never where that is 0, because cores are short.
  explicit IdleSpin(int64_t least_ns) : least_ns_(least_ns), budget_ns_(least_ns) {}

  int64_t budget_ns() const { return budget_ns_; }

  // Says that work came after a pause of so long. A pause that is longer than any spin, such as the
  // one between two requests of a user, halves the budget; a shorter one sets it to four times its
  // length, so that a single long pause, such as that between two tokens, costs no wake-up later.
  void came_after(int64_t pause_ns) {
    const int64_t most_ns = kMostTimes * least_ns_;
    const int64_t wanted_ns = pause_ns <= most_ns ? 4 * pause_ns : budget_ns_ / 2;
    budget_ns_ = std::clamp(wanted_ns, least_ns_, most_ns);
  }

 private:
  // With the usual 50 us it spins for 1 ms at most, once for each pause.
  static constexpr int64_t kMostTimes = 20;

  int64_t least_ns_;
  int64_t budget_ns_;
};

}  // namespace dflash
