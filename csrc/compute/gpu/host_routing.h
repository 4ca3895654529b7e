// The routing lists of a small batch, made at the host: a decode step's few pairs are listed there
// faster than four launches could, and the exact numbers of tiles spare the device blocks without
// work. kernels/route.h makes the same lists on the device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/gpu/kernel_params.h"

namespace dflash::compute::gpu {

// of a batch that is listed at the host: above, counting on the device is faster
inline constexpr uint32_t kMostHostPairs = 512;

// Where the lists go, in host memory; as in RoutingParams.
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

// Fills `lists`; ids are below num_experts.
void list_at_host(std::span<const uint16_t> row_counts, std::span<const uint16_t> expert_ids,
                  uint32_t num_experts, const RoutingLists& lists);

}  // namespace dflash::compute::gpu
