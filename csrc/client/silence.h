// Whether a worker answers what it is asked. A pulse says that its process works and nothing more:
// one that hangs half, or that is behind a port which swallows bytes, shows progress for ever. Only
// a whole answer ends a silence, early or late. Neither a pulse nor a fresh data path does, and the
// suspicion outlives even the loss of the worker: who comes back has to answer first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace dflash::client {

// Times are those of the watch clock (watch_clock.h). A silence lasts while an answer is owed.
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
