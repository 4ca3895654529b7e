// Gate, up and down for few rows: a block computes 32 outputs (a lane each) of up to four slots. Its sub-groups take one chain of 256 inputs
// each, all at once; then the chain sums are added in ascending order, so that splitting K changes no bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/project.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kFewThreads = 256;  // at most; a multiple of 64
inline constexpr uint32_t kFewSubgroups = kFewThreads / kSubgroupLanes;

struct FewSums {
  SharedArray<float, 2 * kFewSubgroups * kFewTileRows * kPanelWidth> sums;  // [matrix, sub-group, slot, output]
  GPU_FN static uint32_t index(uint32_t matrix, uint32_t subgroup, uint32_t slot) {
    return ((matrix * kFewSubgroups + subgroup) * kFewTileRows + slot) * kPanelWidth + lane_index();
  }
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
        const Float4 inputs = load_16<Float4>(rows[r] + begin + i);
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
  for (uint32_t r = 0; r < kFewTileRows; ++r) shared.sums.at(FewSums::index(matrix, subgroup_index(), r)) = sums[r];
}

template <WeightFormat kFormat, bool kIsGateUp>
GPU_FN void project_few(const ProjectionParams& params) {
  GPU_SHARED(FewSums, shared);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
  const bool has_second = kIsGateUp && params.spec.gate != GateKind::kNone;
  const unsigned char* first_panel = panel_of<kFormat>(params, tile.expert, params.first_panels, block_x());
  const unsigned char* second_panel = panel_of<kFormat>(params, tile.expert, params.second_panels, block_x());
  const float* rows[kFewTileRows];  // slots that do not exist read the last one again
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) rows[r] = input_of(params, tile.first_slot + smaller(r, tile.num_slots - 1));

  const uint32_t num_subgroups = block_threads() / kSubgroupLanes, chains = num_chains(params.num_inputs);
  float totals[2][kFewTileRows] = {};  // of slots subgroup_index(), + num_subgroups, ...
  for (uint32_t first = 0; first < chains; first += num_subgroups) {
    const uint32_t chain = first + subgroup_index();
    if (chain < chains) {
      store_chain<kFormat>(first_panel, chain, rows, tile, params.num_inputs, 0, shared);
      if (has_second) store_chain<kFormat>(second_panel, chain, rows, tile, params.num_inputs, 1, shared);
    }
    sync_block();
    const uint32_t present = smaller(num_subgroups, chains - first);
    for (uint32_t matrix = 0; matrix < (has_second ? 2u : 1u); ++matrix) {
      GPU_UNROLL
      for (uint32_t i = 0; i < kFewTileRows; ++i) {
        const uint32_t slot = subgroup_index() + i * num_subgroups;
        if (slot >= tile.num_slots) break;
        for (uint32_t c = 0; c < present; ++c) {
          const float sum = shared.sums.at(FewSums::index(matrix, c, slot));
          totals[matrix][i] = first + c == 0 ? sum : add(totals[matrix][i], sum);
        }
      }
    }
    sync_block();
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < kFewTileRows; ++i) {
    const uint32_t slot = subgroup_index() + i * num_subgroups;
    if (slot >= tile.num_slots) break;
    finish_output<kIsGateUp>(params, tile.expert, tile.first_slot + slot, block_x() * kPanelWidth + lane_index(), totals[0][i], totals[1][i]);
  }
}

}  // namespace dflash::compute::gpu
