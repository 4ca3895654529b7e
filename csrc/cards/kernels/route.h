// Makes the routing lists (kernel_params.h) from a request's counts and ids, by four launches in a
// row: begin_routing, count_pairs, list_pairs, order_rows. All of it is integers, and every place
// in a list is a count of what comes before it, so the lists do not depend on the order in which
// threads run.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/block_sums.h"
#include "cards/portable.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kRouteThreads = kSumThreads;
inline constexpr uint32_t kRouteSubgroups = kRouteThreads / kSubgroupLanes;

// Pairs that a sub-group looks at in one turn of list_pairs: 32 per thread.
inline constexpr uint32_t kSubgroupPairs = kSubgroupLanes * kSubgroupLanes;
inline constexpr uint32_t kTurnPairs = kRouteSubgroups * kSubgroupPairs;

GPU_FN uint32_t tiles_of(uint32_t pairs, uint32_t tile_rows) {
  return (pairs + tile_rows - 1) / tile_rows;
}
GPU_FN uint32_t few_tiles_of(uint32_t pairs, uint32_t tile_rows) {
  return pairs <= kMostFewPairs ? tiles_of(pairs, tile_rows) : 0;
}
GPU_FN uint32_t many_tiles_of(uint32_t pairs) {
  return pairs <= kMostFewPairs ? 0 : tiles_of(pairs, kManyTileRows);
}

// Computes where each row's pairs begin. One block.
GPU_KERNEL(dflash_begin_routing, RoutingParams, kRouteThreads) {
  GPU_SHARED(SubgroupSums, sums);
  uint32_t begin = 0;
  for (uint32_t first = 0; first < params.num_rows; first += kRouteThreads) {
    const uint32_t row = first + thread_index();
    uint32_t total;
    const uint32_t before =
        sum_before(row < params.num_rows ? params.row_counts[row] : 0, total, sums);
    if (row < params.num_rows) params.row_begins[row] = begin + before;
    begin += total;
  }
  if (thread_index() == 0) params.row_begins[params.num_rows] = begin;
}

// Counts the pairs of each expert, a block per expert. All blocks together write the row of each
// pair.
GPU_KERNEL(dflash_count_pairs, RoutingParams, kRouteThreads) {
  GPU_SHARED(SubgroupSums, sums);
  uint32_t count = 0, total;
  for (uint32_t pair = thread_index(); pair < params.num_pairs; pair += kRouteThreads) {
    count += params.expert_ids[pair] == block_x() ? 1u : 0u;
  }
  static_cast<void>(sum_before(count, total, sums));
  if (thread_index() == 0) params.expert_counts[block_x()] = total;
  for (uint32_t row = block_x() * kRouteThreads + thread_index(); row < params.num_rows;
       row += grid_x() * kRouteThreads) {
    for (uint32_t pair = params.row_begins[row]; pair < params.row_begins[row + 1]; ++pair)
      params.pair_rows[pair] = row;
  }
}

// Cuts an expert's slots into tiles. All threads of the block.
GPU_FN void write_tiles(Tile* tiles, uint32_t num_tiles, uint32_t tile_rows, uint32_t expert,
                        uint32_t first_slot, uint32_t num_slots) {
  for (uint32_t i = thread_index(); i < num_tiles; i += kRouteThreads) {
    const uint32_t begin = i * tile_rows, rest = num_slots - begin;
    tiles[i] = {expert, first_slot + begin, rest < tile_rows ? rest : tile_rows};
  }
}

// Which of the sub-group's pairs from `begin` on are those of `expert`: bit b of lane l stands for
// pair begin + 32 * l + b. Neighbouring lanes read neighbouring ids, and eight loads are under way
// at once.
GPU_FN uint32_t own_pairs(const RoutingParams& params, uint32_t begin, uint32_t expert) {
  constexpr uint32_t kLoads = 8;
  uint32_t own = 0;
  for (uint32_t first = 0;
       first < kSubgroupLanes && begin + first * kSubgroupLanes < params.num_pairs;
       first += kLoads) {
    bool is_own[kLoads];
    GPU_UNROLL
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t pair = begin + (first + i) * kSubgroupLanes + lane_index();
      is_own[i] = pair < params.num_pairs && params.expert_ids[pair] == expert;
    }
    GPU_UNROLL
    for (uint32_t i = 0; i < kLoads; ++i) {
      const uint32_t bits = ballot(is_own[i]);
      if (first + i == lane_index()) own = bits;
    }
  }
  return own;
}

// Lists each expert's slots and tiles, a block per expert.
GPU_KERNEL(dflash_list_pairs, RoutingParams, kRouteThreads) {
  GPU_SHARED(SubgroupSums, sums);
  const uint32_t expert = block_x(), own_count = params.expert_counts[expert];
  uint32_t slots = 0, few = 0, many = 0;  // of the experts before this one
  for (uint32_t other = thread_index(); other < expert; other += kRouteThreads) {
    const uint32_t count = params.expert_counts[other];
    slots += count;
    few += few_tiles_of(count, params.few_tile_rows);
    many += many_tiles_of(count);
  }
  uint32_t first_slot, first_few, first_many;
  static_cast<void>(sum_before(slots, first_slot, sums));
  static_cast<void>(sum_before(few, first_few, sums));
  static_cast<void>(sum_before(many, first_many, sums));
  const uint32_t num_few = few_tiles_of(own_count, params.few_tile_rows),
                 num_many = many_tiles_of(own_count);
  write_tiles(params.few_tiles + first_few, num_few, params.few_tile_rows, expert, first_slot,
              own_count);
  write_tiles(params.many_tiles + first_many, num_many, kManyTileRows, expert, first_slot,
              own_count);
  if (expert == params.num_experts - 1 && thread_index() == 0) {
    params.num_tiles[0] = first_few + num_few;
    params.num_tiles[1] = first_many + num_many;
  }
  if (own_count == 0) return;  // the whole block
  uint32_t slot = first_slot;
  for (uint32_t first = 0; first < params.num_pairs; first += kTurnPairs) {
    const uint32_t begin = first + thread_index() * kSubgroupLanes;
    uint32_t own = own_pairs(params, first + subgroup_index() * kSubgroupPairs, expert), total;
    uint32_t next = slot + sum_before(count_bits(own), total, sums);
    for (; own != 0; own &= own - 1) {
      const uint32_t pair = begin + lowest_bit(own);
      params.slot_pairs[next] = pair;
      params.pair_slots[pair] = next++;
    }
    slot += total;
  }
}

// Sorts each row's slots, a thread per pair: ascending slots are ascending experts, and pairs of
// the same expert are in order of arrival.
GPU_KERNEL(dflash_order_rows, RoutingParams, kRouteThreads) {
  const uint32_t pair = block_x() * kRouteThreads + thread_index();
  if (pair >= params.num_pairs) return;
  const uint32_t row = params.pair_rows[pair], slot = params.pair_slots[pair];
  const uint32_t begin = params.row_begins[row], end = params.row_begins[row + 1];
  uint32_t before = 0;
  for (uint32_t other = begin; other < end; ++other)
    before += params.pair_slots[other] < slot ? 1u : 0u;
  params.row_slots[begin + before] = slot;
}

}  // namespace dflash::compute::gpu
