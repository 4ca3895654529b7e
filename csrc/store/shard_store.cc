// Lends shards and counts their memory. A layer is created outside of the lock, so that the store
// looks again afterwards.
// SPDX-License-Identifier: Apache-2.0
#include "store/shard_store.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/clock.h"

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

ShardStore::ShardStore(std::shared_ptr<compute::ExpertBackend> backend, uint64_t memory_limit,
                       uint64_t slots_bytes, uint64_t first_number)
    : backend_(std::move(backend)),
      memory_limit_(memory_limit),
      slots_(slots_bytes == 0 ? nullptr : std::make_shared<ExpertSlots>(slots_bytes)),
      next_number_(first_number) {}

Result<std::shared_ptr<ResidentShard>> ShardStore::borrow(const ShardFacts& facts,
                                                          std::optional<uint64_t> free_bytes) {
  DFLASH_TRY(facts.spec.validate());
  if (facts.num_local_experts == 0)
    return Error{ErrorCode::kInvalidArgument, "a shard without experts"};
  auto predicted =
      backend_->predicted_bytes(facts.spec, facts.num_local_experts, facts.formats, facts.numerics);
  if (!predicted.ok()) return std::move(predicted).error();
  const uint64_t num_bytes = slots_ == nullptr ? predicted.value() : 0;
  {
    const std::lock_guard lock(mutex_);
    auto found = find(facts);
    if (!found.ok()) return std::move(found).error();
    if (found.value() != nullptr) return lend(found.value());
    DFLASH_TRY(reserve(num_bytes, facts.num_local_experts, free_bytes));
  }
  // This is done without the lock, because a device may take its time for its memory.
  auto experts =
      backend_->create_layer(facts.spec, facts.num_local_experts, facts.formats, facts.numerics);
  const std::lock_guard lock(mutex_);
  if (!experts.ok() || of_facts(facts) != shards_.end()) {
    reserved_bytes_ -= num_bytes;
    if (!experts.ok()) return std::move(experts).error();
    return Error{ErrorCode::kInvalidArgument, name_of(facts) + " is being loaded by somebody else"};
  }
  const uint64_t number = next_number_++;
  auto entry = std::make_shared<ResidentShard>(
      facts, backend_, std::move(experts).value(), num_bytes,
      ResidentShard::OfStore{
          .number = number, .reports = reports_, .turns = turns_, .slots = slots_});
  shards_.emplace(number, entry);
  return lend(entry);
}

// A worker has hundreds of shards, which are looked for when a host loads.
ShardStore::Entries::iterator ShardStore::of_facts(const ShardFacts& facts) {
  return std::ranges::find_if(
      shards_, [&](const auto& numbered) { return numbered.second->facts() == facts; });
}

Result<ShardStore::Entry> ShardStore::find(const ShardFacts& facts) {
  const auto found = of_facts(facts);
  if (found == shards_.end()) return Entry();
  const Entry& entry = found->second;
  const bool is_in_use = entry->num_loans_.load(std::memory_order_acquire) != 0;
  // A damaged shard in use is loaded again by whoever scrubs it there. One that came back damaged
  // has nobody to do that any more: every request for it would wait and fail.
  const bool is_whole = entry->num_damaged_.load(std::memory_order_acquire) == 0;
  if (entry->is_complete() && (is_whole || is_in_use)) return entry;
  if (is_in_use)
    return Error{ErrorCode::kInvalidArgument, name_of(facts) + " is being loaded by somebody else"};
  // This is what a loading that failed has left behind, or a shard that is damaged.
  erase(found);
  return Entry();
}

ShardStore::Entries::iterator ShardStore::erase(Entries::iterator entry) {
  reserved_bytes_ -= entry->second->predicted_bytes();
  return shards_.erase(entry);
}

ShardStore::Entries::iterator ShardStore::first_to_go() {
  auto first = shards_.end();
  int64_t first_ns = 0;
  for (auto entry = shards_.begin(); entry != shards_.end(); ++entry) {
    if (entry->second->num_loans_.load(std::memory_order_acquire) != 0) continue;
    const int64_t returned_ns = entry->second->returned_ns_.load(std::memory_order_relaxed);
    if (first != shards_.end() && returned_ns >= first_ns) continue;
    first = entry;
    first_ns = returned_ns;
  }
  return first;
}

// The limit is this worker's own. A host that does not keep to it is refused before a page of what
// it asked for is touched.
Status ShardStore::reserve(uint64_t num_bytes, uint32_t num_experts,
                           std::optional<uint64_t> free_bytes) {
  for (;;) {
    const bool is_granted = memory_limit_ == 0 || num_bytes <= memory_limit_ - reserved_bytes_;
    if (is_granted && (!free_bytes || num_bytes <= *free_bytes)) {
      reserved_bytes_ += num_bytes;
      return ok();
    }
    const auto kept = first_to_go();
    if (kept != shards_.end()) {
      if (free_bytes) *free_bytes += kept->second->resident_bytes();
      erase(kept);
      continue;
    }
    const std::string needed =
        "memory: its " + std::to_string(num_experts) + " experts need " + size_text(num_bytes);
    if (is_granted) {
      return Error{ErrorCode::kInvalidArgument,
                   needed + ", and " + size_text(*free_bytes) +
                       " are free there now; place fewer experts there"};
    }
    return Error{ErrorCode::kInvalidArgument,
                 needed + ", and " + size_text(reserved_bytes_) + " of the " +
                     size_text(memory_limit_) +
                     " that this worker's topology grants are taken; place fewer experts there or "
                     "raise its `memory`"};
  }
}

// Every loan is counted on its own, so that copies of one count once, and the background reader's
// hold on a shard does not count.
ShardStore::Entry ShardStore::lend(const Entry& entry) {
  entry->num_loans_.fetch_add(1, std::memory_order_relaxed);
  return {entry.get(), [entry](ResidentShard* shard) {
            shard->returned_ns_.store(now_ns(), std::memory_order_relaxed);
            shard->num_loans_.fetch_sub(1, std::memory_order_release);
          }};
}

Status ShardStore::load_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                               const compute::ExpertWeights& weights) {
  Status loaded = loan->load_expert(local_expert_id, weights, progress_);
  if (!loaded.ok()) {
    return std::move(loaded).error().with("local expert " + std::to_string(local_expert_id));
  }
  read_in_background(*loan);
  return ok();
}

Status ShardStore::map_expert(const std::shared_ptr<ResidentShard>& loan, uint32_t local_expert_id,
                              std::shared_ptr<const MappedFile> file, uint64_t offset,
                              uint64_t content_checksum, uint32_t panels_sum) {
  const bool is_loading = !loan->is_complete();
  DFLASH_TRY(
      loan->map_expert(local_expert_id, std::move(file), offset, content_checksum, panels_sum));
  if (is_loading) read_in_background(*loan);
  return ok();
}

// It is for the last expert of a shard; another one may have been loaded by another thread.
void ShardStore::read_in_background(const ResidentShard& loan) {
  if (!loan.is_complete() || (loan.content().checksum && !loan.has_unsummed())) return;
  const std::lock_guard lock(mutex_);
  const auto found = shards_.find(loan.number());
  if (found != shards_.end()) reader_.add(found->second);
}

int64_t ShardStore::drop_unborrowed(int64_t kept_ns) {
  const int64_t now = now_ns();
  const std::lock_guard lock(mutex_);
  for (;;) {
    const auto entry = first_to_go();
    if (entry == shards_.end()) return 0;
    const int64_t left_ns =
        entry->second->returned_ns_.load(std::memory_order_relaxed) + kept_ns - now;
    if (kept_ns > 0 && left_ns > 0) return left_ns;
    erase(entry);
  }
}

void ShardStore::drop_failed() {
  const std::lock_guard lock(mutex_);
  for (auto entry = shards_.begin(); entry != shards_.end();) {
    const bool is_left = entry->second->num_loans_.load(std::memory_order_acquire) == 0 &&
                         !entry->second->is_complete();
    entry = is_left ? erase(entry) : std::next(entry);
  }
}

uint64_t ShardStore::num_experts() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = 0;
  for (const auto& [number, entry] : shards_)
    total += entry->is_complete() ? entry->facts().num_local_experts : 0;
  return total;
}

std::shared_ptr<ResidentShard> ShardStore::at_or_after(uint64_t number) const {
  const std::lock_guard lock(mutex_);
  auto entry = shards_.lower_bound(number);
  for (size_t tried = 0; tried < shards_.size(); ++tried, ++entry) {
    if (entry == shards_.end()) entry = shards_.begin();
    if (entry->second->is_complete()) return entry->second;
  }
  return nullptr;
}

uint64_t ShardStore::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t total = slots_ == nullptr ? 0 : slots_->touched_bytes();
  for (const auto& [number, entry] : shards_) total += entry->resident_bytes();
  return total;
}

size_t ShardStore::num_shards() const {
  const std::lock_guard lock(mutex_);
  return shards_.size();
}

}  // namespace dflash::store
