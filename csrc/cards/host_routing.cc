// SPDX-License-Identifier: Apache-2.0
#include "cards/host_routing.h"

#include <algorithm>

namespace dflash::compute::gpu {
namespace {

// Cuts one expert's slots into tiles of `tile_rows`.
uint32_t add_tiles(Tile* tiles, uint32_t num_tiles, uint32_t tile_rows, uint32_t expert,
                   uint32_t first_slot, uint32_t num_slots) {
  for (uint32_t begin = 0; begin < num_slots; begin += tile_rows) {
    tiles[num_tiles++] = {expert, first_slot + begin, std::min(tile_rows, num_slots - begin)};
  }
  return num_tiles;
}

}  // namespace

void list_at_host(std::span<const uint16_t> row_counts, std::span<const uint16_t> expert_ids,
                  uint32_t num_experts, const RoutingLists& lists) {
  uint32_t begin = 0;
  for (uint32_t row = 0; row < row_counts.size(); ++row) {
    lists.row_begins[row] = begin;
    for (const uint32_t end = begin + row_counts[row]; begin < end; ++begin)
      lists.pair_rows[begin] = row;
  }
  lists.row_begins[row_counts.size()] = begin;

  // First the counts, then where each expert's next pair goes.
  std::vector<uint32_t> next_slot(num_experts + size_t{1}, 0);
  for (const uint16_t expert : expert_ids) ++next_slot[expert + size_t{1}];
  lists.num_tiles[0] = lists.num_tiles[1] = 0;
  for (uint32_t expert = 0; expert < num_experts; ++expert) {
    const uint32_t count = next_slot[expert + size_t{1}], first = next_slot[expert];
    const bool is_few = count <= kMostFewPairs;
    uint32_t& num_tiles = lists.num_tiles[is_few ? 0 : 1];
    num_tiles = add_tiles(is_few ? lists.few_tiles : lists.many_tiles, num_tiles,
                          is_few ? lists.few_tile_rows : kManyTileRows, expert, first, count);
    next_slot[expert + size_t{1}] = first + count;
  }
  // A row's pairs get their slots here one after the other. Sorted slots are ascending experts.
  for (uint32_t row = 0, pair = 0; row < row_counts.size(); ++row) {
    uint32_t* const slots = lists.row_slots + pair;
    for (uint32_t i = 0; i < row_counts[row]; ++i, ++pair) {
      slots[i] = next_slot[expert_ids[pair]]++;
      lists.slot_pairs[slots[i]] = pair;
    }
    std::sort(slots, slots + row_counts[row]);
  }
}

}  // namespace dflash::compute::gpu
