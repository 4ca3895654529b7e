// Gate, up and down of class f16-dot2 for few rows: the blocks and chains of project_few.h, each chain made of dot products of 32 inputs, with the
// instructions of dot2_many.h in the same order. A weight of bf16 takes six instructions beside those of its rows (widen, compare, scale, round,
// half a pack, half a dot2 per row), less than a gfx906 has time for while it reads one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/dot2_rows.h"
#include "compute/gpu/kernels/project_few.h"

namespace dflash::compute::gpu {

// A group's step of a chain.
template <WeightFormat kFormat>
GPU_FN float half_group_step(const HalfGroup& weights, const HalfRecord& row, uint32_t index, float sum) {
  constexpr uint32_t kParts = group_parts(kFormat), kUnits = kGroupPairs / 4;
  const float row_scale = row.scale(index);
  float dots[kParts] = {};
  GPU_UNROLL
  for (uint32_t u = 0; u < kUnits; ++u) {
    const Unit codes = load_device_16<Unit>(row.codes(index) + u * kUnitBytes);
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) dots[u * kParts / kUnits] = dot2(codes.words[w], weights.words[4 * u + w], dots[u * kParts / kUnits]);
  }
  GPU_UNROLL
  for (uint32_t p = 0; p < kParts; ++p) sum = fused(dots[p], mul(weights.scales[p], row_scale), sum);
  if constexpr (has_offset(kFormat)) sum = fused(weights.offset, row.scaled_sum(index), sum);
  return sum;
}

template <WeightFormat kFormat, uint32_t kRows>
GPU_FN void half_chain_sums(const Record& record, const HalfRecord* rows, uint32_t num_groups, float* sums) {
  GPU_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) sums[r] = 0.0f;
  const auto step = [&](uint32_t index) {
    HalfGroup weights;
    read_halves<kFormat>(record, index, weights);
    GPU_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) sums[r] = half_group_step<kFormat>(weights, rows[r], index, sums[r]);
  };
  if constexpr (kRows == 1) {
    GPU_UNROLL_2  // loads of a group go ahead of the products of the one before
    for (uint32_t index = 0; index < num_groups; ++index) step(index);
  } else {
    for (uint32_t index = 0; index < num_groups; ++index) step(index);
  }
}

template <WeightFormat kFormat>
GPU_FN void dot2_few(const ProjectionParams& params) {
  if constexpr (kHasDot2) {
    GPU_SHARED(FewSums, shared);
    if (block_y() >= *params.num_tiles) return;  // the whole block
    const Tile tile = params.tiles[block_y()];
    uint32_t units[kFewTileRows];  // where rows begin; slots that do not exist read the last one again
    GPU_UNROLL
    for (uint32_t r = 0; r < kFewTileRows; ++r) units[r] = HalfRecord::first_unit(params, tile.first_slot + smaller(r, tile.num_slots - 1));
    few_outputs(params, tile, shared, [&](uint32_t chain, uint32_t matrix, uint64_t panels) {
      const unsigned char* panel = panel_of<kFormat>(params, tile.expert, panels, block_x());
      const Record record{panel + chain * chain_bytes(kFormat) + lane_index() * kUnitBytes};
      HalfRecord chain_rows[kFewTileRows];
      GPU_UNROLL
      for (uint32_t r = 0; r < kFewTileRows; ++r) chain_rows[r] = {params.codes, units[r] + chain * HalfRecord::kRecordUnits};
      const uint32_t num_groups = (smaller(kChain, params.num_inputs - chain * kChain) + kGroup - 1) / kGroup;
      float sums[kFewTileRows] = {};
      if (tile.num_slots == 1) half_chain_sums<kFormat, 1>(record, chain_rows, num_groups, sums);
      else half_chain_sums<kFormat, kFewTileRows>(record, chain_rows, num_groups, sums);
      GPU_UNROLL
      for (uint32_t r = 0; r < kFewTileRows; ++r) shared.chain(matrix, subgroup_index(), r) = sums[r];
    });
  } else {
    stop_kernel();
  }
}

}  // namespace dflash::compute::gpu
