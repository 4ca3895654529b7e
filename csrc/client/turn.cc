// The turn on a mutex and a condition variable. Whoever drives sleeps outside of the mutex, in
// wait_any, and is woken through the bell.
// SPDX-License-Identifier: Apache-2.0
#include "client/turn.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>

namespace dflash::client {

TurnTable::TurnTable() : bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void TurnTable::acquire() {
  std::unique_lock lock(mutex_);
  if (is_taken_) {
    is_shared_.store(true, std::memory_order_relaxed);
    num_wanting_.fetch_add(1, std::memory_order_relaxed);
    if (!is_rung_ && bell_.is_open()) {
      const uint64_t one = 1;
      is_rung_ = ::write(bell_.get(), &one, sizeof one) == sizeof one;
    }
    ++num_sleeping_;
    while (is_taken_) released_.wait(lock);
    --num_sleeping_;
    num_wanting_.fetch_sub(1, std::memory_order_relaxed);
  }
  quieten_bell();
  is_taken_ = true;
}

bool TurnTable::try_acquire() {
  const std::unique_lock lock(mutex_);
  if (is_taken_ || is_wanted()) return false;
  is_taken_ = true;
  return true;
}

bool TurnTable::acquire_to_drive(Deadline until) {
  std::unique_lock lock(mutex_);
  if (is_taken_ || is_wanted()) {
    is_shared_.store(true, std::memory_order_relaxed);
    ++num_sleeping_;
    released_.wait_until(
        lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(until.when_ns())));
    --num_sleeping_;
    return false;
  }
  is_taken_ = true;
  return true;
}

void TurnTable::release() {
  bool has_sleepers = false;
  {
    const std::unique_lock lock(mutex_);
    is_taken_ = false;
    has_sleepers = num_sleeping_ > 0;
  }
  if (has_sleepers) released_.notify_all();
}

// The last thread that wanted a short turn empties the bell. The caller holds mutex_.
void TurnTable::quieten_bell() {
  if (!is_rung_ || is_wanted()) return;
  uint64_t count = 0;
  if (::read(bell_.get(), &count, sizeof count) == sizeof count) is_rung_ = false;
}

}  // namespace dflash::client
