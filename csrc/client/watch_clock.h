// The clock by which calls and workers are judged: the machine's, which stands still while nobody
// looks. A client has no thread of its own. While its callers compute, or while the process is
// stopped, nobody takes in what has arrived and nobody sends what waits, so that such time must
// count against no worker. A look covers one tick at most, since whoever waits for replies looks
// again by then; whatever it came later is left out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

namespace dflash::client {

// The longest time between two looks of a thread that waits for replies. It bounds how late a
// hang-up, a stall or a deadline is seen: a hang-up must be acted on within 100 ms.
inline constexpr int64_t kTickNs = 20'000'000;

// Times are in nanoseconds; those called real are now_ns().
class WatchClock {
 public:
  // What this clock shows at `real_ns`, which is no earlier than the last look.
  int64_t at(int64_t real_ns) const {
    return std::min(real_ns, last_look_ns_ + kTickNs) - missed_ns_;
  }
  // What it shows at the last look.
  int64_t at_last_look() const { return last_look_ns_ - missed_ns_; }
  // Says that somebody looks at `real_ns`.
  void look(int64_t real_ns) {
    missed_ns_ += std::max(int64_t{0}, real_ns - last_look_ns_ - kTickNs);
    last_look_ns_ = real_ns;
  }

 private:
  int64_t last_look_ns_ = 0;
  int64_t missed_ns_ = 0;
};

}  // namespace dflash::client
