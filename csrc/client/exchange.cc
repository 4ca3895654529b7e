// The routing of a layer as ragged lists. A token's pairs are sorted by shard and local expert, and
// then appended to the lists of their shards.
// SPDX-License-Identifier: Apache-2.0
#include "client/exchange.h"

#include <array>

#include "wire/limits.h"

namespace dflash::client {

void ShardRows::clear() {
  tokens.clear();
  row_counts.clear();
  local_expert_ids.clear();
  weights.clear();
}

Result<ExpertTable> ExpertTable::build(uint32_t num_experts,
                                       const std::vector<std::vector<uint32_t>>& shards) {
  constexpr uint32_t kNowhere = ~0u;
  ExpertTable table;
  table.num_shards_ = shards.size();
  table.entries_.assign(num_experts, Entry{kNowhere, 0});
  for (uint32_t s = 0; s < shards.size(); ++s) {
    if (shards[s].empty() || shards[s].size() > wire::kMaxExpertsPerShard) {
      return Error{ErrorCode::kInvalidArgument,
                   "a shard holds " + std::to_string(shards[s].size()) +
                       " experts, allowed are 1.." + std::to_string(wire::kMaxExpertsPerShard)};
    }
    for (size_t i = 0; i < shards[s].size(); ++i) {
      const uint32_t expert = shards[s][i];
      if (expert >= num_experts || (i > 0 && expert <= shards[s][i - 1])) {
        return Error{
            ErrorCode::kInvalidArgument,
            "expert " + std::to_string(expert) + " is out of range or out of order in its shard"};
      }
      if (table.entries_[expert].shard != kNowhere) {
        return Error{ErrorCode::kInvalidArgument,
                     "expert " + std::to_string(expert) + " is in two shards"};
      }
      table.entries_[expert] = Entry{s, static_cast<uint16_t>(i)};
    }
  }
  for (uint32_t expert = 0; expert < num_experts; ++expert) {
    if (table.entries_[expert].shard == kNowhere) {
      return Error{ErrorCode::kInvalidArgument,
                   "expert " + std::to_string(expert) + " is in no shard"};
    }
  }
  return table;
}

template <class Id>
Status ExpertTable::exchange(std::span<const Id> topk_ids, std::span<const float> topk_weights,
                             uint32_t top_k, std::span<ShardRows> rows) const {
  for (ShardRows& one : rows) one.clear();
  struct Pair {
    Entry entry;
    float weight;
  };
  std::array<Pair, wire::kMaxPairsPerRow> pairs;
  const size_t num_tokens = top_k == 0 ? 0 : topk_ids.size() / top_k;
  for (size_t t = 0; t < num_tokens; ++t) {
    size_t num_pairs = 0;
    for (size_t k = 0; k < top_k; ++k) {
      const Id id = topk_ids[t * top_k + k];
      // A negative id is a large one here, so that one comparison suffices for experts.
      const auto expert = static_cast<uint64_t>(id);
      if (expert >= entries_.size()) {
        if (expert == entries_.size()) continue;
        return Error{ErrorCode::kInvalidArgument,
                     "topk_ids[" + std::to_string(t) + ", " + std::to_string(k) + "] is " +
                         std::to_string(id) + "; allowed are the experts 0.." +
                         std::to_string(entries_.size() - 1) + ", and " +
                         std::to_string(entries_.size()) + " for none"};
      }
      const Pair pair{entries_[expert], topk_weights[t * top_k + k]};
      size_t at = num_pairs++;  // insertion keeps equal experts in top-k order, and top_k is small
      for (; at > 0; --at) {
        const Entry& before = pairs[at - 1].entry;
        if (before.shard < pair.entry.shard ||
            (before.shard == pair.entry.shard &&
             before.local_expert_id <= pair.entry.local_expert_id)) {
          break;
        }
        pairs[at] = pairs[at - 1];
      }
      pairs[at] = pair;
    }
    for (size_t i = 0; i < num_pairs; ++i) {
      ShardRows& row = rows[pairs[i].entry.shard];
      if (i == 0 || pairs[i].entry.shard != pairs[i - 1].entry.shard) {
        row.tokens.push_back(static_cast<uint32_t>(t));
        row.row_counts.push_back(0);
      }
      ++row.row_counts.back();
      row.local_expert_ids.push_back(pairs[i].entry.local_expert_id);
      row.weights.push_back(pairs[i].weight);
    }
  }
  return ok();
}

template Status ExpertTable::exchange<int32_t>(std::span<const int32_t>, std::span<const float>,
                                               uint32_t, std::span<ShardRows>) const;
template Status ExpertTable::exchange<int64_t>(std::span<const int64_t>, std::span<const float>,
                                               uint32_t, std::span<ShardRows>) const;

}  // namespace dflash::client
