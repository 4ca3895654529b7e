// A counting sort of (row, expert) pairs by expert; it is stable.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/expert_groups.h"

#include <algorithm>

namespace dflash::compute {

void ExpertGroups::build(std::span<const uint16_t> row_counts,
                         std::span<const uint16_t> local_expert_ids, std::span<const float> weights,
                         uint32_t num_local_experts) {
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
