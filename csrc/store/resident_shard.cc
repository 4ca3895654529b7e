// A shard's loading and what is known of its contents, by one atomic per expert.
// SPDX-License-Identifier: Apache-2.0
#include "store/resident_shard.h"

#include <utility>

namespace dflash::store {

ResidentShard::ResidentShard(const ShardFacts& facts,
                             std::shared_ptr<compute::ExpertBackend> backend,
                             std::unique_ptr<compute::ExpertLayer> experts,
                             uint64_t predicted_bytes)
    : facts_(facts),
      predicted_bytes_(predicted_bytes),
      backend_(std::move(backend)),
      experts_(std::move(experts)),
      sources_(facts.num_local_experts) {}

bool ResidentShard::is_complete() const {
  return num_loaded_.load(std::memory_order_acquire) == facts_.num_local_experts;
}

// The layer is asked only when nobody loads into it any more.
uint64_t ResidentShard::resident_bytes() const {
  if (is_complete()) return experts_->resident_bytes();
  const uint64_t num_loaded = num_loaded_.load(std::memory_order_relaxed);
  return predicted_bytes_ / facts_.num_local_experts * num_loaded;
}

Status ResidentShard::load_expert(uint32_t local_expert_id, const compute::ExpertWeights& weights,
                                  compute::YieldingProgress& progress) {
  DFLASH_TRY(experts_->load_expert(local_expert_id, weights, progress));
  Expert& expert = sources_[local_expert_id];
  const bool is_new = expert.source.load(std::memory_order_relaxed) == Source::kAbsent;
  const std::optional<uint64_t> checksum = experts_->content_checksum(local_expert_id);
  if (checksum) {
    expert.checksum = *checksum;
  } else {
    expert.weights = weights;
  }
  expert.source.store(checksum ? Source::kRead : Source::kUnread, std::memory_order_release);
  if (is_new) num_loaded_.fetch_add(1, std::memory_order_release);
  return ok();
}

bool ResidentShard::keeps_sources(uint32_t local_expert_id) const {
  return local_expert_id < sources_.size() &&
         sources_[local_expert_id].source.load(std::memory_order_acquire) == Source::kUnread;
}

ContentState ResidentShard::content() const {
  ContentState state;
  std::vector<uint64_t> values;
  values.reserve(sources_.size());
  for (const Expert& expert : sources_) {
    if (expert.source.load(std::memory_order_acquire) == Source::kRead)
      values.push_back(expert.checksum);
  }
  state.num_read = static_cast<uint32_t>(values.size());
  if (values.size() == sources_.size()) state.checksum = compute::shard_checksum(values);
  const std::lock_guard lock(failure_mutex_);
  state.failure = failure_;
  return state;
}

}  // namespace dflash::store
