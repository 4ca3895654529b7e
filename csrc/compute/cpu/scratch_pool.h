// The memory in which calls compute, lent for as long as a call is under way. So there are as many
// blocks of it as calls at the same time, not one for each layer, and their pages are touched once:
// 48 layers of their own would take 48 times the memory, and each would pay for its pages in its
// first large call. Memory that nobody used for kIdleNs goes back to the system.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "compute/cpu/page_buffer.h"

namespace dflash::compute {

// A block that grows with its uses and is used again.
class ScratchBlock {
 public:
  // Returns at least `num_bytes` bytes, aligned to 64, which stay until the next call. Errors:
  // kOutOfMemory.
  Result<std::byte*> room_for(size_t num_bytes) {
    if (num_bytes > buffer_.num_bytes()) {
      buffer_ = PageBuffer();  // released first, so that both blocks need not exist at once
      // A little more, so that calls which grow by a few rows each do not touch new pages each.
      auto grown = PageBuffer::create(num_bytes + num_bytes / 8);
      if (!grown.ok()) return std::move(grown).error();
      buffer_ = std::move(grown).value();
    }
    return buffer_.data();
  }
  size_t num_bytes() const { return buffer_.num_bytes(); }

 private:
  PageBuffer buffer_;
};

// Lends objects of a `Scratch`, which is made by its default constructor and says how many bytes it
// has by num_bytes(). Any thread may borrow; the pool must outlive what it lends.
template <class Scratch>
class ScratchPool {
 public:
  // What was used within this time stays; so long may a chat pause without paying for pages again.
  static constexpr int64_t kIdleNs = 60'000'000'000;
  // Less than this is never given back: it is what a decode step needs, and no thread is started
  // for it.
  static constexpr size_t kKeptBytes = size_t{4} << 20;

  explicit ScratchPool(int64_t idle_ns = kIdleNs) : idle_ns_(idle_ns) {}
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;
  ~ScratchPool() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    closing_.notify_all();
    if (releaser_.joinable()) releaser_.join();
  }

  // A loan, which ends with this object.
  class Loan {
   public:
    Loan(ScratchPool& pool, std::unique_ptr<Scratch> scratch)
        : pool_(pool), scratch_(std::move(scratch)) {}
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    ~Loan() { pool_.take_back(std::move(scratch_)); }
    Scratch& operator*() const { return *scratch_; }
    Scratch* operator->() const { return scratch_.get(); }

   private:
    ScratchPool& pool_;
    std::unique_ptr<Scratch> scratch_;
  };

  // Lends what came back last, whose pages are the likeliest in a cache, or a new one.
  Loan lend() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto found = std::move(idle_.back().scratch);
        idle_.pop_back();
        return {*this, std::move(found)};
      }
    }
    return {*this, std::make_unique<Scratch>()};
  }

  // The bytes of what is not lent now.
  size_t idle_bytes() const {
    const std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const Idle& idle : idle_) bytes += idle.scratch->num_bytes();
    return bytes;
  }

 private:
  struct Idle {
    std::unique_ptr<Scratch> scratch;
    int64_t since_ns;  // 0 for what is too small to be given back
  };

  void take_back(std::unique_ptr<Scratch> scratch) {
    const std::lock_guard lock(mutex_);
    // A decode step lends small blocks hundreds of times, which read no clock.
    const bool is_large = scratch->num_bytes() > kKeptBytes;
    idle_.push_back({std::move(scratch), is_large ? now_ns() : 0});
    if (!is_large || releaser_.joinable()) return;
    try {
      releaser_ = std::thread([this] { release_idle(); });
    } catch (const std::system_error&) {
      // A process that gets no thread keeps its memory, and computes all the same.
    }
  }

  // Frees what is due, until the pool ends. It sleeps for as long as nothing can be due.
  void release_idle() {
    std::unique_lock lock(mutex_);
    while (!is_closing_) {
      const int64_t now = now_ns();
      int64_t next_ns = now + idle_ns_;
      std::vector<Idle> due;
      for (size_t i = 0; i < idle_.size();) {
        if (idle_[i].since_ns == 0) {
          ++i;
        } else if (idle_[i].since_ns + idle_ns_ > now) {
          next_ns = std::min(next_ns, idle_[i++].since_ns + idle_ns_);
        } else {
          due.push_back(std::move(idle_[i]));
          idle_.erase(idle_.begin() + static_cast<std::ptrdiff_t>(i));
        }
      }
      if (!due.empty()) {
        // Unmapping takes milliseconds, in which others may borrow.
        lock.unlock();
        due.clear();
        lock.lock();
        continue;
      }
      closing_.wait_for(lock, std::chrono::nanoseconds(next_ns - now));
    }
  }

  const int64_t idle_ns_;
  mutable std::mutex mutex_;
  std::vector<Idle> idle_;   // the last one came back last; guarded by mutex_
  bool is_closing_ = false;  // guarded by mutex_
  std::condition_variable closing_;
  std::thread releaser_;  // started with the first large block; guarded by mutex_ until it joins
};

}  // namespace dflash::compute
