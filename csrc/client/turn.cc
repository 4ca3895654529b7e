// The turn on a mutex and a condition variable. Whoever drives sleeps outside of the mutex, in
// wait_any, and is woken through the bell.
// SPDX-License-Identifier: Apache-2.0
#include "client/turn.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <chrono>

namespace dflash::client {

Bell::Bell() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void Bell::ring() {
  const uint64_t one = 1;
  if (!is_rung_) is_rung_ = ::write(fd(), &one, sizeof one) == sizeof one;
}

void Bell::quieten() {
  uint64_t count = 0;
  if (is_rung_ && ::read(fd(), &count, sizeof count) == sizeof count) is_rung_ = false;
}

void TurnTable::acquire() {
  std::unique_lock lock(mutex_);
  if (is_taken_) {
    is_shared_.store(true, std::memory_order_relaxed);
    num_wanting_.fetch_add(1, std::memory_order_relaxed);
    bell_.ring();
    ++num_sleeping_;
    while (is_taken_) released_.wait(lock);
    --num_sleeping_;
    num_wanting_.fetch_sub(1, std::memory_order_relaxed);
  }
  if (!is_wanted()) bell_.quieten();
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

}  // namespace dflash::client
