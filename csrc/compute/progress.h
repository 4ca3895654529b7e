// The progress counter of a worker. It is bumped at least every 20 ms of work, so that an observer
// can tell busy from stuck. The thread that owns the data path may hang a task on it, which keeps
// bytes moving in both directions while that thread computes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace dflash::compute {

class ProgressCounter {
 public:
  explicit ProgressCounter(uint64_t start = 0) : count_(start) {}

  // Any thread. On the thread that made the Task in force, this also runs the task, which may move
  // bytes: a caller must expect that here.
  void fetch_add(uint64_t steps, std::memory_order order) {
    count_.fetch_add(steps, order);
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) run_(context_);
  }
  uint64_t load(std::memory_order order = std::memory_order_relaxed) const {
    return count_.load(order);
  }
  const std::atomic<uint64_t>& count() const { return count_; }

  // While it lives, `body` runs at every bump by the thread that made it. It is called without
  // arguments and must not block. One Task may exist at a time.
  template <class Body>
  class Task {
   public:
    Task(ProgressCounter& progress, Body& body) : progress_(progress) {
      progress.context_ = &body;
      progress.run_ = [](void* context) { (*static_cast<Body*>(context))(); };
      progress.owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Task() { progress_.owner_.store(std::thread::id(), std::memory_order_relaxed); }
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

   private:
    ProgressCounter& progress_;
  };

 private:
  std::atomic<uint64_t> count_;
  // Relaxed, because only the owner reads what the owner wrote beside it.
  std::atomic<std::thread::id> owner_{};
  void (*run_)(void*) = nullptr;  // used by the owner's thread only
  void* context_ = nullptr;       // used by the owner's thread only
};

}  // namespace dflash::compute
