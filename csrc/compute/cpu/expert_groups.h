// A ragged batch regrouped by expert. Experts ascend, and inside an expert the pairs keep the order
// in which they came: rows ascend, and a row's duplicates stay in top-k order. The routed sum is
// taken in this order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace dflash::compute
