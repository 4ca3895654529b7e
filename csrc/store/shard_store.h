// The shards that a worker process has resident, found by all that decides their numbers. Sessions
// borrow those that their hosts ask for, one copy for all of them, and give them back at their end.
// What nobody borrows any more stays until its room is needed or it is dropped, so that a host that
// comes back finds it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "store/background_reader.h"
#include "store/resident_shard.h"

namespace dflash::store {

class ShardStore {
 public:
  // `memory_limit` is how many bytes the weights of all shards may take; 0 stands for no limit.
  // With `slots_bytes` shards keep no experts of their own: these bytes are slots for those in use.
  // The first shard gets `first_number`, each later one the next.
  explicit ShardStore(std::shared_ptr<compute::ExpertBackend> backend, uint64_t memory_limit = 0,
                      uint64_t slots_bytes = 0, uint64_t first_number = 1);
  ShardStore(const ShardStore&) = delete;
  ShardStore& operator=(const ShardStore&) = delete;

  // Lends the shard of these facts: the one that is there and complete, unless it came back
  // damaged, or a new one without experts. Where the memory limit, or the `free_bytes` of the
  // memory that it will lie in, have no room for a new one, shards that nobody has borrowed are
  // freed, those that came back first before the others. The loan ends with the last copy of the
  // pointer; the shard outlives the store where need be. Any thread. Errors: kInvalidArgument where
  // there is no room for all that (before any of that memory is touched), or while somebody else
  // loads it; those of ExpertBackend.
  Result<std::shared_ptr<ResidentShard>> borrow(const ShardFacts& facts,
                                                std::optional<uint64_t> free_bytes = std::nullopt);
  // Loads as ResidentShard does. With the last expert, what is still unread goes to the background
  // reader.
  Status load_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                     const compute::ExpertWeights& weights);
  // Maps an expert from a file of panels as ResidentShard does. With the last expert, panels that
  // are not summed up yet go to the background reader.
  Status map_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                    std::shared_ptr<const MappedFile> file, uint64_t offset,
                    uint64_t content_checksum, uint32_t panels_sum);
  // What has been computed in turns. Any thread.
  BatchCounts batch_counts() const { return turns_->counts(); }
  // Frees the shards that nobody has borrowed for `kept_ns`, and returns in how many nanoseconds
  // the next one will have been, 0 where there is none. Any thread.
  int64_t drop_unborrowed(int64_t kept_ns = 0);
  // Frees what loadings that failed have left. Any thread.
  void drop_failed();

  // Loads a damaged expert again, as ResidentShard does. Any thread.
  Status reload_expert(ResidentShard& shard, uint32_t local_expert_id,
                       const compute::ExpertWeights& weights) {
    return shard.reload_expert(local_expert_id, weights, progress_);
  }
  // The complete shard of this number, else of the next higher one, the lowest after the highest;
  // null where there is none. Any thread.
  std::shared_ptr<ResidentShard> at_or_after(uint64_t number) const;
  // Null where there are none. Any thread may ask for its stats.
  const ExpertSlots* slots() const { return slots_.get(); }
  // What is found damaged in any shard of this store.
  DamageReports& reports() const { return *reports_; }
  // The experts of all complete shards. Any thread.
  uint64_t num_experts() const;

  // Both may be asked by any thread.
  uint64_t resident_bytes() const;
  size_t num_shards() const;

 private:
  using Entry = std::shared_ptr<ResidentShard>;
  using Entries = std::map<uint64_t, Entry>;  // by ResidentShard::number()

  // Returns null where there is none to lend and a new one may be made. The caller holds mutex_.
  Result<Entry> find(const ShardFacts& facts);
  // The first of these facts, end() without. The caller holds mutex_.
  Entries::iterator of_facts(const ShardFacts& facts);
  // Frees a shard and returns the one behind it. The caller holds mutex_.
  Entries::iterator erase(Entries::iterator entry);
  // Whose turn it is to be freed; end() where all are borrowed. The caller holds mutex_.
  Entries::iterator first_to_go();
  void read_in_background(const ResidentShard& loan);
  // Counts `num_bytes` as taken. The caller holds mutex_.
  Status reserve(uint64_t num_bytes, uint32_t num_experts, std::optional<uint64_t> free_bytes);
  static Entry lend(const Entry& entry);

  const std::shared_ptr<compute::ExpertBackend> backend_;
  const std::shared_ptr<DamageReports> reports_ = std::make_shared<DamageReports>();
  const std::shared_ptr<ComputeTurns> turns_ = std::make_shared<ComputeTurns>();
  const uint64_t memory_limit_;
  const std::shared_ptr<ExpertSlots> slots_;  // null without
  compute::YieldingProgress progress_;        // counts the steps of loading
  mutable std::mutex mutex_;
  Entries shards_;               // guarded by mutex_
  uint64_t next_number_;         // guarded by mutex_
  uint64_t reserved_bytes_ = 0;  // of shards there and of those being made; guarded by mutex_
  BackgroundReader reader_;      // comes last, so that it ends before the shards that it reads
};

}  // namespace dflash::store
