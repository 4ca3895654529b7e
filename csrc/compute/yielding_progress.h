// How far work has come, counted by whoever does it. Two things hang on the count: the worker's
// pulse thread reports it, so that the host can tell busy from stuck, and the thread that owns the
// data path lets bytes move at each count, because nobody else moves them while it computes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace dflash::compute {

class YieldingProgress {
 public:
  explicit YieldingProgress(uint64_t start = 0) : count_(start) {}

  // Counts work that was done; any thread, at least every 20 ms of work. While a YieldTo of the
  // calling thread is in force this also runs its body, which in a worker sends and receives on
  // sockets: call it between pieces of work, with no lock held that the body could want. On other
  // threads it is one addition.
  void count_and_yield(uint64_t steps = 1) {
    count_.fetch_add(steps, std::memory_order_relaxed);
    if (owner_.load(std::memory_order_relaxed) == std::this_thread::get_id()) run_(context_);
  }
  uint64_t load(std::memory_order order = std::memory_order_relaxed) const {
    return count_.load(order);
  }
  const std::atomic<uint64_t>& count() const { return count_; }

  // While it lives, `body` (called without arguments, must not block) runs at every count of the
  // thread that made it. There is one at a time.
  template <class Body>
  class YieldTo {
   public:
    YieldTo(YieldingProgress& progress, Body& body) : progress_(progress) {
      progress.context_ = &body;
      progress.run_ = [](void* context) { (*static_cast<Body*>(context))(); };
      progress.owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~YieldTo() { progress_.owner_.store(std::thread::id(), std::memory_order_relaxed); }
    YieldTo(const YieldTo&) = delete;
    YieldTo& operator=(const YieldTo&) = delete;

   private:
    YieldingProgress& progress_;
  };

 private:
  std::atomic<uint64_t> count_;
  // Relaxed, because only the owner reads what the owner wrote beside it.
  std::atomic<std::thread::id> owner_{};
  void (*run_)(void*) = nullptr;  // owner's thread only
  void* context_ = nullptr;       // owner's thread only
};

}  // namespace dflash::compute
