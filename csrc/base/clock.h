// Monotonic time and deadlines. Every wait in the product takes a Deadline.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <limits>

namespace dflash {

// CLOCK_MONOTONIC in nanoseconds, which is the same clock in every process of one machine.
int64_t now_ns();

// CPU time that this thread has used, in nanoseconds. It stands still while the thread sleeps or
// others have its core.
int64_t thread_cpu_ns();

// Sleeps for so long, or less where a signal comes. For work that takes its time on purpose, in
// pieces of about a millisecond; whoever waits for another party uses transport::wait_any.
void nap_ns(int64_t nanoseconds);

// A point in monotonic time.
class Deadline {
 public:
  static Deadline at_ns(int64_t when_ns) { return Deadline(when_ns); }
  static Deadline after_ns(int64_t delay_ns) { return Deadline(now_ns() + delay_ns); }
  static Deadline after_ms(int64_t delay_ms) { return after_ns(delay_ms * 1'000'000); }

  int64_t when_ns() const { return when_ns_; }
  bool has_passed() const { return now_ns() >= when_ns_; }
  // The nanoseconds that are left, never negative.
  int64_t left_ns() const {
    const int64_t left = when_ns_ - now_ns();
    return left > 0 ? left : 0;
  }
  Deadline earlier(Deadline other) const { return other.when_ns_ < when_ns_ ? other : *this; }

 private:
  explicit Deadline(int64_t when_ns) : when_ns_(when_ns) {}
  int64_t when_ns_;
};

}  // namespace dflash
