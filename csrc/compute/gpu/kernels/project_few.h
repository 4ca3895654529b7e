// Gate, up and down for few rows: a block computes 32 outputs (a lane each) of up to four slots. Its sub-groups take one chain of 256 inputs
// each, all at once; then the chain sums are added in ascending order, so that splitting K changes no bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/project.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kFewThreads = 256;  // at most; a multiple of 64
inline constexpr uint32_t kFewSubgroups = kFewThreads / kSubgroupLanes;

struct FewSums {
  SharedArray<float, 2 * kFewSubgroups * kFewTileRows * kPanelWidth> chains;  // [matrix, sub-group, slot, output]
  SharedArray<float, 2 * kFewTileRows * kPanelWidth> totals;                  // [matrix, slot, output]

  GPU_FN float& chain(uint32_t matrix, uint32_t subgroup, uint32_t slot) {
    return chains.at(((matrix * kFewSubgroups + subgroup) * kFewTileRows + slot) * kPanelWidth + lane_index());
  }
  GPU_FN float& total(uint32_t matrix, uint32_t slot) { return totals.at((matrix * kFewTileRows + slot) * kPanelWidth + lane_index()); }
};

// One chain of one output for kRows rows.
template <WeightFormat kFormat, uint32_t kRows>
GPU_FN void chain_sums(Record record, const float* const* rows, uint32_t count, float* sums) {
  GPU_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) sums[r] = 0.0f;
  for (uint32_t begin = 0; begin < count; begin += kGroup) {
    float weights[kGroup];
    decode_group<kFormat>(record, begin / kGroup, weights);
    if (count - begin < kGroup) {  // an input that does not exist must not enter the chain: -0 + 0 * 0 is +0
      for (uint32_t r = 0; r < kRows; ++r) {
        GPU_UNROLL
        for (uint32_t i = 0; i < kGroup; ++i) {
          if (i < count - begin) sums[r] = fused(weights[i], rows[r][begin + i], sums[r]);
        }
      }
      continue;
    }
    GPU_UNROLL
    for (uint32_t i = 0; i < kGroup; i += 4) {
      GPU_UNROLL
      for (uint32_t r = 0; r < kRows; ++r) {
        const Float4 inputs = load_device_16<Float4>(rows[r] + begin + i);
        GPU_UNROLL
        for (uint32_t j = 0; j < 4; ++j) sums[r] = fused(weights[i + j], inputs.values[j], sums[r]);
      }
    }
  }
}

// The chain's sums of one matrix into shared memory, for the tile's rows.
template <WeightFormat kFormat>
GPU_FN void store_chain(const unsigned char* panel, uint32_t chain, const float* const* rows, const Tile& tile, uint32_t num_inputs,
                        uint32_t matrix, FewSums& shared) {
  const Record record{panel + chain * chain_bytes(kFormat) + lane_index() * kUnitBytes};
  const float* chain_rows[kFewTileRows];
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) chain_rows[r] = rows[r] + chain * kChain;
  const uint32_t count = smaller(kChain, num_inputs - chain * kChain);
  float sums[kFewTileRows] = {};
  if (tile.num_slots == 1) chain_sums<kFormat, 1>(record, chain_rows, count, sums);
  else chain_sums<kFormat, kFewTileRows>(record, chain_rows, count, sums);
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) shared.chain(matrix, subgroup_index(), r) = sums[r];
}

// Adds the `present` chain sums of the round in ascending order. A sub-group owns every num_subgroups-th slot, here and at the end.
GPU_FN void add_chains(uint32_t matrix, uint32_t present, bool is_first, const Tile& tile, FewSums& shared) {
  for (uint32_t slot = subgroup_index(); slot < tile.num_slots; slot += block_threads() / kSubgroupLanes) {
    float total = is_first ? shared.chain(matrix, 0, slot) : add(shared.total(matrix, slot), shared.chain(matrix, 0, slot));
    for (uint32_t c = 1; c < present; ++c) total = add(total, shared.chain(matrix, c, slot));
    shared.total(matrix, slot) = total;
  }
}

// The tile's outputs: store(chain, matrix, panels) puts the sums of one chain into shared memory, panels being the matrix's offset.
template <class StoreChain>
GPU_FN void few_outputs(const ProjectionParams& params, const Tile& tile, FewSums& shared, const StoreChain& store) {
  const uint32_t num_matrices = is_gated(params) ? 2 : 1;
  const uint32_t num_subgroups = block_threads() / kSubgroupLanes, chains = num_chains(params.num_inputs);
  for (uint32_t first = 0; first < chains; first += num_subgroups) {
    const uint32_t chain = first + subgroup_index();
    for (uint32_t matrix = 0; matrix < num_matrices; ++matrix) {
      if (chain >= chains) break;
      store(chain, matrix, matrix == 0 ? params.first_panels : params.second_panels);
    }
    sync_block();
    for (uint32_t matrix = 0; matrix < num_matrices; ++matrix) {
      add_chains(matrix, smaller(num_subgroups, chains - first), first == 0, tile, shared);
    }
    sync_block();
  }
  for (uint32_t slot = subgroup_index(); slot < tile.num_slots; slot += num_subgroups) {
    finish_output(params, tile.expert, tile.first_slot + slot, block_x() * kPanelWidth + lane_index(), shared.total(0, slot),
                  num_matrices == 2 ? shared.total(1, slot) : 0.0f);
  }
}

template <WeightFormat kFormat>
GPU_FN void project_few(const ProjectionParams& params) {
  GPU_SHARED(FewSums, shared);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
  const float* rows[kFewTileRows];  // slots that do not exist read the last one again
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) rows[r] = input_of(params, tile.first_slot + smaller(r, tile.num_slots - 1));
  few_outputs(params, tile, shared, [&](uint32_t chain, uint32_t matrix, uint64_t panels) {
    store_chain<kFormat>(panel_of<kFormat>(params, tile.expert, panels, block_x()), chain, rows, tile, params.num_inputs, matrix, shared);
  });
}

}  // namespace dflash::compute::gpu
