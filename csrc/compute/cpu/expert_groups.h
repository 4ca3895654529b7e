// A ragged batch regrouped by expert: experts ascending, and inside an expert the pairs in the
// order they came (rows ascending, a row's duplicates in top-k order). This order is the order of
// the routed sum.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace dflash::compute {

struct ExpertGroup {
  uint32_t local_expert_id;
  uint32_t first_pair;  // into the grouped arrays
  uint32_t num_pairs;
};

class ExpertGroups {
 public:
  // Regroups; keeps its memory from call to call. Ids are < num_local_experts and counts match the
  // spans (checked by the caller).
  void build(std::span<const uint16_t> row_counts, std::span<const uint16_t> local_expert_ids,
             std::span<const float> weights, uint32_t num_local_experts);

  const std::vector<ExpertGroup>& groups() const { return groups_; }  // only experts with pairs
  const std::vector<uint32_t>& rows() const { return rows_; }         // [num_pairs] grouped
  const std::vector<float>& weights() const { return weights_; }      // [num_pairs] grouped
  uint32_t most_pairs() const { return most_pairs_; }                 // of one expert

 private:
  std::vector<ExpertGroup> groups_;
  std::vector<uint32_t> rows_;
  std::vector<float> weights_;
  std::vector<uint32_t> next_;  // [num_local_experts] where the next pair of an expert goes
  uint32_t most_pairs_ = 0;
};

}  // namespace dflash::compute
