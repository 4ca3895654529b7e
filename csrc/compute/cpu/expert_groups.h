// A ragged batch regrouped by expert. Experts ascend, and inside an expert the pairs keep the order
// in which they came: rows ascend, and a row's duplicates stay in top-k order. The routed sum is
// taken in this order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace dflash::compute {

// The pairs of one expert.
struct ExpertGroup {
  uint32_t local_expert_id;
  uint32_t first_pair;  // index into the grouped arrays
  uint32_t num_pairs;
};

class ExpertGroups {
 public:
  // Regroups a batch; the memory is kept from call to call. The caller has checked that ids are
  // less than num_local_experts and that the counts add up to the spans.
  void build(std::span<const uint16_t> row_counts, std::span<const uint16_t> local_expert_ids,
             std::span<const float> weights, uint32_t num_local_experts);

  const std::vector<ExpertGroup>& groups() const { return groups_; }  // of experts that have pairs
  const std::vector<uint32_t>& rows() const { return rows_; }         // [num_pairs], grouped
  const std::vector<float>& weights() const { return weights_; }      // [num_pairs], grouped
  uint32_t most_pairs() const { return most_pairs_; }                 // the largest num_pairs

 private:
  std::vector<ExpertGroup> groups_;
  std::vector<uint32_t> rows_;
  std::vector<float> weights_;
  std::vector<uint32_t> next_;  // [num_local_experts], where an expert's next pair goes
  uint32_t most_pairs_ = 0;
};

// A counting sort of pairs by expert; it is stable.
inline void ExpertGroups::build(std::span<const uint16_t> row_counts,
                                std::span<const uint16_t> local_expert_ids,
                                std::span<const float> weights, uint32_t num_local_experts) {
  next_.assign(num_local_experts, 0);
  for (uint16_t id : local_expert_ids) ++next_[id];
  groups_.clear();
  most_pairs_ = 0;
  uint32_t first = 0;
  for (uint32_t id = 0; id < num_local_experts; ++id) {
    const uint32_t count = next_[id];
    if (count != 0) groups_.push_back({id, first, count});
    most_pairs_ = std::max(most_pairs_, count);
    next_[id] = first;
    first += count;
  }
  rows_.resize(local_expert_ids.size());
  weights_.resize(local_expert_ids.size());
  size_t pair = 0;
  for (uint32_t row = 0; row < row_counts.size(); ++row) {
    for (uint32_t end = row_counts[row]; end != 0; --end, ++pair) {
      const uint32_t place = next_[local_expert_ids[pair]]++;
      rows_[place] = row;
      weights_[place] = weights[pair];
    }
  }
}

}  // namespace dflash::compute
