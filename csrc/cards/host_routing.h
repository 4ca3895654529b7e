// The routing lists of a small batch, made on the host. It lists the few pairs of a decode step
// faster than four launches could, and because it knows the exact numbers of tiles, no blocks
// without work are launched. kernels/route.h makes the same lists on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "cards/kernel_params.h"

namespace dflash::compute::gpu {

// The largest batch that is listed on the host; above, counting on the device is faster.
inline constexpr uint32_t kMostHostPairs = 512;

// Where the lists go, in host memory. The fields are those of RoutingParams.
struct RoutingLists {
  uint32_t* row_begins;  // [num_rows + 1]
  uint32_t* pair_rows;   // [num_pairs]
  uint32_t* slot_pairs;  // [num_pairs]
  uint32_t* row_slots;   // [num_pairs]
  uint32_t* num_tiles;   // [2]
  Tile* few_tiles;
  Tile* many_tiles;
  uint32_t few_tile_rows;
};

// Fills `lists`. The ids must be below num_experts.
void list_at_host(std::span<const uint16_t> row_counts, std::span<const uint16_t> expert_ids,
                  uint32_t num_experts, const RoutingLists& lists);

}  // namespace dflash::compute::gpu
