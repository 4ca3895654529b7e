// Reads the source bytes of shards that nobody has read whole, one after another, for their content
// checksums, and sums up panels that were mapped from files. Its thread has the lowest priority for
// reads and on the processor, because calls that compute from the same pages go first. It reads in
// steps of a megabyte, and stops within one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "store/resident_shard.h"

namespace dflash::store {

class BackgroundReader {
 public:
  BackgroundReader() = default;
  BackgroundReader(const BackgroundReader&) = delete;
  BackgroundReader& operator=(const BackgroundReader&) = delete;
  ~BackgroundReader();

  // Queues a shard; any thread. The reader's thread starts with the first one. A shard that goes
  // away meanwhile is left at the next step. One that cannot be read says why in its ContentState.
  void add(const std::shared_ptr<ResidentShard>& shard);

 private:
  void run();
  void read(const std::weak_ptr<ResidentShard>& shard);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::weak_ptr<ResidentShard>> waiting_;  // guarded by mutex_
  std::atomic<bool> stopping_{false};                 // set under mutex_
  std::thread thread_;
};

}  // namespace dflash::store
