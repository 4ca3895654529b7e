// Sums up resident weights again, one expert after another, and finds those that have changed in
// memory since they were loaded, and hands on what calls have found. It reads on the caller's
// thread and paces itself: a whole pass takes the period, and never more than a hundredth of a
// core. The thread keeps its priority. A process that is killed lets go of its sockets with its
// last thread, and on a busy machine one of low priority would run, and so end, a second too late
// for those who wait for that.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "store/shard_store.h"

namespace dflash::store {

struct ScrubStats {
  uint64_t scrubbed_bytes = 0;  // summed up again since the start
  uint64_t damages = 0;         // experts found changed
};

class Scrubber {
 public:
  // `period_s` is how long a pass over all weights takes; with 0 there is none, and what others
  // find is all. It may be set anew.
  Scrubber(std::shared_ptr<ShardStore> store, double period_s)
      : store_(std::move(store)), period_s_(period_s) {}

  // Sums up expert after expert, and returns the next one that is damaged, whoever has found it, or
  // nothing once stop() was called. One thread at a time. A shard that cannot be read is left for
  // this pass.
  std::optional<Damage> run();
  // Any thread.
  void set_period(double period_s);
  // Any thread; run() returns within the time of a megabyte.
  void stop();
  ScrubStats stats() const;

 private:
  std::optional<Damage> next_report();
  int64_t sum_up_one();

  const std::shared_ptr<ShardStore> store_;
  std::atomic<double> period_s_;
  uint64_t number_ = 0;       // of the shard that is read; run() only
  uint32_t next_expert_ = 0;  // run() only
  std::atomic<uint64_t> scrubbed_bytes_{0}, damages_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace dflash::store
