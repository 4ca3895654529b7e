// The experts that were found changed, for whoever loads them again: a queue between those who sum
// up weights, in calls and beside them, and the one thread that waits for what they find.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>

namespace dflash::store {

// An expert whose weights are not those that were loaded.
struct Damage {
  uint64_t shard_number = 0;  // ResidentShard::number()
  uint32_t local_expert_id = 0;
};

// Any thread. An expert is reported once for each time that it changes, so that the queue is never
// longer than the store has experts.
class DamageReports {
 public:
  void add(Damage damage) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(damage);
    }
    changed_.notify_all();
  }
  std::optional<Damage> take() {
    const std::lock_guard lock(mutex_);
    if (waiting_.empty()) return std::nullopt;
    const Damage damage = waiting_.front();
    waiting_.pop_front();
    return damage;
  }
  // Waits for a report, for `is_over`, or for so many nanoseconds.
  template <typename IsOver>
  void wait(int64_t nanoseconds, const IsOver& is_over) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::nanoseconds(nanoseconds),
                      [&] { return !waiting_.empty() || is_over(); });
  }
  // Makes those who wait look at what ends their wait. It was set before.
  void wake() {
    {
      const std::lock_guard lock(mutex_);
    }
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Damage> waiting_;  // guarded
};

}  // namespace dflash::store
