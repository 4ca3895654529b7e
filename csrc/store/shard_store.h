// The shards that a worker process has resident, found by what names their weights. A session
// borrows those that its host asks for and gives them back at its end. They stay until they are
// dropped or something else is asked for, so that the next session finds those of the former one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "store/background_reader.h"
#include "store/resident_shard.h"

namespace dflash::store {

class ShardStore {
 public:
  // `memory_limit` is how many bytes the weights of all shards may take; 0 stands for no limit.
  explicit ShardStore(std::shared_ptr<compute::ExpertBackend> backend, uint64_t memory_limit = 0);
  ShardStore(const ShardStore&) = delete;
  ShardStore& operator=(const ShardStore&) = delete;

  // Lends the shard of these facts: the one that is there and complete, unless it came back
  // damaged, or a new one without experts, for which all shards that nobody has borrowed make room.
  // The loan ends with the last copy of the pointer; the shard outlives the store where need be.
  // Any thread. Errors: kInvalidArgument where its experts would exceed the memory limit (before
  // any of that memory is touched), where another shard in use claims the same fingerprint, or
  // while somebody else loads it; those of ExpertBackend.
  Result<std::shared_ptr<ResidentShard>> borrow(const ShardFacts& facts);
  // Loads as ResidentShard does. With the last expert, what is still unread goes to the background
  // reader.
  Status load_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                     const compute::ExpertWeights& weights);
  // Frees the shards that nobody has borrowed. Any thread.
  void drop_unborrowed();

  // Loads a damaged expert again, as ResidentShard does. Any thread.
  Status reload_expert(ResidentShard& shard, uint32_t local_expert_id,
                       const compute::ExpertWeights& weights) {
    return shard.reload_expert(local_expert_id, weights, progress_);
  }
  // The complete shard of this fingerprint, else of the next higher one, the lowest after the
  // highest; null where there is none. Any thread.
  std::shared_ptr<ResidentShard> at_or_after(uint64_t weights_fingerprint) const;
  // The experts of all complete shards. Any thread.
  uint64_t num_experts() const;

  // Both may be asked by any thread.
  uint64_t resident_bytes() const;
  size_t num_shards() const;

 private:
  using Entry = std::shared_ptr<ResidentShard>;

  // Returns null where there is none to lend and a new one may be made. The caller holds mutex_.
  Result<Entry> find(const ShardFacts& facts);
  // drop_unborrowed(), for a caller that holds mutex_.
  void erase_unborrowed();
  // Counts `num_bytes` as taken. The caller holds mutex_.
  Status reserve(uint64_t num_bytes, uint32_t num_experts);
  static Entry lend(const Entry& entry);

  const std::shared_ptr<compute::ExpertBackend> backend_;
  const uint64_t memory_limit_;
  compute::YieldingProgress progress_;  // counts the steps of loading
  mutable std::mutex mutex_;
  std::map<uint64_t, Entry> shards_;  // by weights fingerprint; guarded by mutex_
  uint64_t reserved_bytes_ = 0;       // of shards there and of those being made; guarded by mutex_
  BackgroundReader reader_;           // comes last, so that it ends before the shards that it reads
};

}  // namespace dflash::store
