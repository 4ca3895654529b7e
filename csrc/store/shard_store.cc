// Lends shards and counts their memory. A layer is created outside of the lock, so that the store
// looks again afterwards.
// SPDX-License-Identifier: Apache-2.0
#include "store/shard_store.h"

#include <string>
#include <utility>

namespace dflash::store {
namespace {

std::string size_text(uint64_t bytes) {
  const bool is_large = bytes >= 10ull << 20;
  return std::to_string(bytes >> (is_large ? 20 : 10)) + (is_large ? " MiB" : " KiB");
}

std::string name_of(const ShardFacts& facts) {
  return "weights_fingerprint " + std::to_string(facts.weights_fingerprint);
}

}  // namespace

ShardStore::ShardStore(std::shared_ptr<compute::ExpertBackend> backend, uint64_t memory_limit)
    : backend_(std::move(backend)), memory_limit_(memory_limit) {}

Result<std::shared_ptr<ResidentShard>> ShardStore::borrow(const ShardFacts& facts) {
  DFLASH_TRY(facts.spec.validate());
  if (facts.num_local_experts == 0)
    return Error{ErrorCode::kInvalidArgument, "a shard without experts"};
  auto predicted =
      backend_->predicted_bytes(facts.spec, facts.num_local_experts, facts.formats, facts.numerics);
  if (!predicted.ok()) return std::move(predicted).error();
  const uint64_t num_bytes = predicted.value();
  {
    const std::lock_guard lock(mutex_);
    auto found = find(facts);
    if (!found.ok()) return std::move(found).error();
    if (found.value() != nullptr) return lend(found.value());
    erase_unborrowed();
    DFLASH_TRY(reserve(num_bytes, facts.num_local_experts));
  }
  // This is done without the lock, because a device may take its time for its memory.
  auto experts =
      backend_->create_layer(facts.spec, facts.num_local_experts, facts.formats, facts.numerics);
  const std::lock_guard lock(mutex_);
  if (!experts.ok() || shards_.contains(facts.weights_fingerprint)) {
    reserved_bytes_ -= num_bytes;
    if (!experts.ok()) return std::move(experts).error();
    return Error{ErrorCode::kInvalidArgument, name_of(facts) + " is being loaded by somebody else"};
  }
  auto entry =
      std::make_shared<ResidentShard>(facts, backend_, std::move(experts).value(), num_bytes);
  shards_.emplace(facts.weights_fingerprint, entry);
  return lend(entry);
}

Result<ShardStore::Entry> ShardStore::find(const ShardFacts& facts) {
  const auto found = shards_.find(facts.weights_fingerprint);
  if (found == shards_.end()) return Entry();
  const Entry& entry = found->second;
  const bool is_in_use = entry->num_loans_.load(std::memory_order_acquire) != 0;
  // A damaged shard in use is loaded again by whoever scrubs it there. One that came back damaged
  // has nobody to do that any more: every request for it would wait and fail.
  const bool is_whole = entry->num_damaged_.load(std::memory_order_acquire) == 0;
  if (entry->is_complete() && entry->facts() == facts && (is_whole || is_in_use)) return entry;
  if (is_in_use) {
    return Error{ErrorCode::kInvalidArgument,
                 name_of(facts) + (entry->facts() == facts
                                       ? " is being loaded by somebody else"
                                       : " names a shard in use whose description differs")};
  }
  // This is what a loading that failed has left behind, or a shard that is damaged.
  reserved_bytes_ -= entry->predicted_bytes();
  shards_.erase(found);
  return Entry();
}

// The limit is this worker's own. A host that does not keep to it is refused before a page of what
// it asked for is touched.
Status ShardStore::reserve(uint64_t num_bytes, uint32_t num_experts) {
  if (memory_limit_ == 0 || num_bytes <= memory_limit_ - reserved_bytes_) {
    reserved_bytes_ += num_bytes;
    return ok();
  }
  return Error{ErrorCode::kInvalidArgument,
               "memory: its " + std::to_string(num_experts) + " experts need " +
                   size_text(num_bytes) + ", and " + size_text(reserved_bytes_) + " of the " +
                   size_text(memory_limit_) +
                   " that this worker's topology grants are taken; place fewer experts there or "
                   "raise its `memory`"};
}

// Every loan is counted on its own, so that copies of one count once, and the background reader's
// hold on a shard does not count.
ShardStore::Entry ShardStore::lend(const Entry& entry) {
  entry->num_loans_.fetch_add(1, std::memory_order_relaxed);
  return {entry.get(), [entry](ResidentShard* shard) {
            shard->num_loans_.fetch_sub(1, std::memory_order_release);
          }};
}

Status ShardStore::load_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                               const compute::ExpertWeights& weights) {
  Status loaded = loan->load_expert(local_expert_id, weights, progress_);
  if (!loaded.ok()) {
    return std::move(loaded).error().with("local expert " + std::to_string(local_expert_id));
  }
  if (!loan->is_complete() || loan->content().checksum) return ok();
  const std::lock_guard lock(mutex_);
  const auto found = shards_.find(loan->facts().weights_fingerprint);
  if (found != shards_.end() && found->second.get() == loan.get()) reader_.add(found->second);
  return ok();
}

void ShardStore::drop_unborrowed() {
  const std::lock_guard lock(mutex_);
  erase_unborrowed();
}

void ShardStore::erase_unborrowed() {
  for (auto entry = shards_.begin(); entry != shards_.end();) {
    if (entry->second->num_loans_.load(std::memory_order_acquire) != 0) {
      ++entry;
      continue;
    }
    reserved_bytes_ -= entry->second->predicted_bytes();
    entry = shards_.erase(entry);
  }
}

uint64_t ShardStore::num_experts() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [fingerprint, entry] : shards_)
    total += entry->is_complete() ? entry->facts().num_local_experts : 0;
  return total;
}

std::shared_ptr<ResidentShard> ShardStore::at_or_after(uint64_t weights_fingerprint) const {
  const std::lock_guard lock(mutex_);
  auto entry = shards_.lower_bound(weights_fingerprint);
  for (size_t tried = 0; tried < shards_.size(); ++tried, ++entry) {
    if (entry == shards_.end()) entry = shards_.begin();
    if (entry->second->is_complete()) return entry->second;
  }
  return nullptr;
}

uint64_t ShardStore::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [fingerprint, entry] : shards_) total += entry->resident_bytes();
  return total;
}

size_t ShardStore::num_shards() const {
  const std::lock_guard lock(mutex_);
  return shards_.size();
}

}  // namespace dflash::store
