// Sums up resident weights again, one expert after another, and finds those that have changed in
// memory since they were loaded. It reads on the caller's thread and paces itself: a whole pass
// takes the period, and never more than a hundredth of a core. The thread keeps its priority. A
// process that is killed lets go of its sockets with its last thread, and on a busy machine one of
// low priority would run, and so end, a second too late for those who wait for that.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "store/shard_store.h"

namespace dflash::store {

// An expert whose weights are not those that were loaded.
struct Damage {
  uint64_t weights_fingerprint = 0;
  uint32_t local_expert_id = 0;
};

struct ScrubStats {
  uint64_t scrubbed_bytes = 0;  // summed up again since the start
  uint64_t damages = 0;         // experts found changed
};

class Scrubber {
 public:
  // `period_s` is how long a pass over all weights takes, above 0.
  Scrubber(std::shared_ptr<ShardStore> store, double period_s)
      : store_(std::move(store)), period_s_(period_s) {}

  // Sums up expert after expert, and returns the next one that is damaged, or nothing once stop()
  // was called. One thread at a time. A shard that cannot be read is left for this pass.
  std::optional<Damage> run();
  // Any thread; run() returns within the time of a megabyte.
  void stop();
  ScrubStats stats() const;

 private:
  bool pause(int64_t nanoseconds);

  const std::shared_ptr<ShardStore> store_;
  const double period_s_;
  uint64_t fingerprint_ = 0;  // of the shard that is read; run() only
  uint32_t next_expert_ = 0;  // run() only
  std::atomic<uint64_t> scrubbed_bytes_{0}, damages_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace dflash::store
