// Pure index arithmetic, from a layer's routing to one ragged list per shard. It knows no worker,
// slot or byte.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace dflash::client {

// The rows of one shard in ascending token order. Row r belongs to token tokens[r] and has
// row_counts[r] pairs. Within a row, experts ascend by local id and duplicates keep their top-k
// order.
struct ShardRows {
  std::vector<uint32_t> tokens;            // [num_rows]
  std::vector<uint16_t> row_counts;        // [num_rows]
  std::vector<uint16_t> local_expert_ids;  // [num_pairs]
  std::vector<float> weights;              // [num_pairs]

  void clear();
};

// Which shard holds an expert, and under which local id. It is built once per layer and then only
// read.
class ExpertTable {
 public:
  // `shards[s]` lists the experts of shard s in ascending global id. Errors: kInvalidArgument
  // naming the expert where one of [0, num_experts) is in no shard or in two, or an id is out of
  // range.
  static Result<ExpertTable> build(uint32_t num_experts,
                                   const std::vector<std::vector<uint32_t>>& shards);

  uint32_t num_experts() const { return static_cast<uint32_t>(entries_.size()); }
  size_t num_shards() const { return num_shards_; }

  // Fills `rows[s]` for every shard. The id num_experts is a sentinel, which is dropped; zero
  // weights and duplicates are kept. topk_ids and topk_weights are [num_tokens, top_k]. Errors:
  // kInvalidArgument on any other id that is no expert, naming token, position and what is allowed.
  template <class Id>
  Status exchange(std::span<const Id> topk_ids, std::span<const float> topk_weights, uint32_t top_k,
                  std::span<ShardRows> rows) const;

 private:
  struct Entry {
    uint32_t shard;
    uint16_t local_expert_id;
  };
  std::vector<Entry> entries_;  // [num_experts]
  size_t num_shards_ = 0;
};

// Returns into how many ranges a call of `num_tokens` is cut. Their lengths differ by at most one,
// and the longer ones come first.
constexpr uint32_t num_slices(uint32_t num_tokens, uint32_t slice_tokens) {
  return num_tokens / slice_tokens + (num_tokens % slice_tokens != 0 ? 1 : 0);
}
// Returns one past the last token of range `index`.
constexpr uint32_t slice_end(uint32_t num_tokens, uint32_t num_ranges, uint32_t index) {
  const uint32_t longer = num_tokens % num_ranges;
  return (index + 1) * (num_tokens / num_ranges) + (index + 1 < longer ? index + 1 : longer);
}

}  // namespace dflash::client
