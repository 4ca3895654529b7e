// The turn says who may touch the engine. One thread at a time has it. The thread that waits for
// replies keeps it while it sleeps, and is woken when another wants a short turn (submit, abandon,
// counters), which always comes before the next driver's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

#include "base/clock.h"
#include "base/owned_fd.h"

namespace dflash::client {

// An eventfd that is readable while it is rung. Not thread-safe. If the system has none left,
// whoever listens looks by itself after a while.
class Bell {
 public:
  Bell();
  int fd() const { return fd_.get(); }  // negative where the system had none left
  void ring();
  void quieten();

 private:
  OwnedFd fd_;
  bool is_rung_ = false;  // whether it holds a count
};

// Any thread. A thread that has the turn must not ask for it again.
class TurnTable {
 public:
  // What a driver passes to wait_any: it is readable while somebody wants a short turn. It is -1
  // until two threads have met here once, so that a single-threaded host can sleep on a futex; the
  // first meeting costs at most one tick.
  int wake_fd() const { return is_shared_.load(std::memory_order_relaxed) ? bell_.fd() : -1; }
  // Whether the driver must give the turn up.
  bool is_wanted() const { return num_wanting_.load(std::memory_order_relaxed) > 0; }

  // Waits for a short turn. The wait is bounded, because a driver yields within one tick and short
  // turns end by themselves.
  void acquire();
  bool try_acquire();  // without waiting; returns whether this thread has the turn
  // Returns true if this thread has the turn and drives. False means that the turn has changed
  // hands or `until` has passed, so that the caller must look again.
  bool acquire_to_drive(Deadline until);
  void release();

 private:
  std::mutex mutex_;
  std::condition_variable released_;
  bool is_taken_ = false;
  uint32_t num_sleeping_ = 0;  // threads that wait for released_
  // Relaxed, because it is a hint to the driver; mutex_ orders everything else.
  std::atomic<uint32_t> num_wanting_ = 0;
  std::atomic<bool> is_shared_ = false;  // relaxed for the same reason
  Bell bell_;                            // guarded by mutex_, but for its descriptor
};

// Holds a turn for the length of a scope, however that is left: what the engine does may throw
// where memory has run out, and a turn that nobody gives back would be waited for without end.
class Turn {
 public:
  // A short turn, which it waits for.
  explicit Turn(TurnTable& table) : table_(table) { table_.acquire(); }
  // The turn that this thread has got already.
  Turn(TurnTable& table, std::adopt_lock_t) : table_(table) {}
  ~Turn() { table_.release(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  TurnTable& table_;
};

}  // namespace dflash::client
