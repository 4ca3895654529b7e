// By what a worker is judged: a clock, its pulses (Liveness) and its answers (Silence). All times
// are in nanoseconds of that clock. Whoever has the turn (turn.h) uses it; nothing here blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/owned_fd.h"

namespace dflash::client {

// The longest time between two looks of a thread that waits for replies. It bounds how late a
// hang-up, a stall or a deadline is seen: a hang-up must be acted on within 100 ms.
inline constexpr int64_t kTickNs = 20'000'000;

// The clock by which calls and workers are judged: the machine's, which stands still while nobody
// looks. A client has no thread of its own. While its callers compute, or while the process is
// stopped, nobody takes in what has arrived and nobody sends what waits, so that such time must
// count against no worker. A look covers one tick at most, since whoever waits for replies looks
// again by then; whatever it came later is left out. Times called real are now_ns().
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

// A time in seconds with one decimal, such as "2.0 s".
std::string seconds_text(int64_t nanoseconds);

// Whether a worker is still alive, judged by its pulses. It is not if their socket hangs up, if
// bytes come that are no pulse, or if the progress counter stands still while the worker owes
// something.
class Liveness {
 public:
  // Without a socket, the worker lives in this process.
  explicit Liveness(OwnedFd pulse) : pulse_(std::move(pulse)) {}

  // Says that the worker begins to owe something: its time counts from here.
  void begin_to_owe(int64_t now) {
    last_change_ns_ = now;
    is_resting_ = false;
  }
  // Says that something waits to be sent to the worker, which owes nothing. If it was at rest, its
  // time counts from here: what it did before says nothing.
  void begin_to_wait(int64_t now) {
    if (is_resting_) begin_to_owe(now);
  }
  // Says that nothing is expected of the worker.
  void rest() { is_resting_ = true; }
  // Reads every pulse that waits. Returns a reason if the worker must be given up.
  std::optional<std::string> read_pulses(int64_t now);
  // Whether there are pulses. A worker in this process is never judged.
  bool is_judged() const { return pulse_.is_open(); }
  // Whether the counter has stood still for `stall_ns`; asked of a worker that owes something.
  bool is_stalled(int64_t now, int64_t stall_ns) const {
    return is_judged() && now - last_change_ns_ > stall_ns;
  }
  std::string stall_text(int64_t now) const {
    return "no progress for " + seconds_text(now - last_change_ns_);
  }
  // The last counter that the worker sent. It changes when the worker makes progress.
  uint64_t counter() const { return last_counter_; }
  // When the last pulse was read, by the machine's clock; 0 where none ever was.
  int64_t last_pulse_ns() const { return last_pulse_ns_; }
  // The socket, whose end tells at once that the process is gone; -1 where there is none.
  int fd() const { return pulse_.is_open() ? pulse_.get() : -1; }
  void close() { pulse_.close(); }

 private:
  bool read_once(int64_t now, std::optional<std::string>& failure);

  OwnedFd pulse_;
  bool is_resting_ = true;
  uint64_t last_counter_ = 0;
  int64_t last_pulse_ns_ = 0;
  int64_t last_change_ns_ = 0;         // when the counter changed, or the worker began to owe
  std::vector<std::byte> incomplete_;  // the beginning of a pulse whose rest has not come yet
};

// Whether a worker answers what it is asked. A pulse says that its process works and nothing more:
// one that hangs half, or that is behind a port which swallows bytes, shows progress for ever. Only
// a whole answer ends a silence, early or late. Neither a pulse nor a fresh data path does, and the
// suspicion outlives even the loss of the worker: who comes back has to answer first. A silence
// lasts while an answer is owed.
class Silence {
 public:
  // A request goes to the worker.
  void ask(int64_t now) {
    if (since_ns_ == 0) since_ns_ = now;
  }
  // A whole answer has come; `is_owed` says whether another one is. Returns whether a suspicion
  // ends.
  bool hear(int64_t now, bool is_owed) {
    before_ns_ = limit_ns_ = 0;
    since_ns_ = is_owed ? now : 0;
    heard_ns_ = now;
    return std::exchange(is_suspect_, false);
  }
  // The data path ends, and with it what is owed, which had `limit_ns`.
  void pause(int64_t now, int64_t limit_ns) {
    before_ns_ = lasts_ns(now);
    limit_ns_ = limit_ns;
    since_ns_ = 0;
  }
  // The worker is lost, and whoever comes back gets all of its time anew.
  void forget() { since_ns_ = before_ns_ = limit_ns_ = 0; }
  void suspect() { is_suspect_ = true; }

  int64_t lasts_ns(int64_t now) const {
    return before_ns_ + (since_ns_ == 0 ? 0 : now - since_ns_);
  }
  // The limit of answers that were owed on former paths of this silence.
  int64_t limit_ns() const { return limit_ns_; }
  bool has_heard_since(int64_t when) const { return heard_ns_ > when; }
  bool is_suspect() const { return is_suspect_; }

 private:
  int64_t since_ns_ = 0;   // since when it owes an answer on its present path; 0 while it does not
  int64_t before_ns_ = 0;  // how long the silence lasted on former paths
  int64_t limit_ns_ = 0;
  int64_t heard_ns_ = 0;
  bool is_suspect_ = false;
};

}  // namespace dflash::client
