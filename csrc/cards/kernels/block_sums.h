// Sums over the threads of a block, for kernels that give each thread a place behind those before
// it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kSumThreads = 256;  // of every block that calls sum_before
inline constexpr uint32_t kSumSubgroups = kSumThreads / kSubgroupLanes;

using SubgroupSums = SharedArray<uint32_t, kSumSubgroups>;

// The sum of `value` over the threads before this one; `total` gets the sum over all. Every thread
// of the block calls it together. `sums` is free again after the next barrier.
GPU_FN uint32_t sum_before(uint32_t value, uint32_t& total, SubgroupSums& sums) {
  const uint32_t lane = lane_index();
  uint32_t sum = value;
  for (uint32_t step = 1; step < kSubgroupLanes; step *= 2) {
    const uint32_t other = shuffle(sum, (lane - step) % kSubgroupLanes);
    if (lane >= step) sum += other;
  }
  if (lane == kSubgroupLanes - 1) sums.at(subgroup_index()) = sum;
  sync_block();
  uint32_t before = sum - value;
  total = 0;
  for (uint32_t i = 0; i < kSumSubgroups; ++i) {
    const uint32_t part = sums.at(i);
    if (i < subgroup_index()) before += part;
    total += part;
  }
  sync_block();
  return before;
}

}  // namespace dflash::compute::gpu
