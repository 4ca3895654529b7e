// Gate, up and down of class int8-groups for few rows: the blocks and chains of project_few.h, each chain made of integer dot products of
// 32 inputs. The bits are those of int8_many.h and of the CPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/int8_codes.h"
#include "compute/gpu/kernels/int8_rows.h"
#include "compute/gpu/kernels/project_few.h"

namespace dflash::compute::gpu {

// A group's step of a chain: the dot products are exact, everything after them rounds once.
template <WeightFormat kFormat>
GPU_FN float group_step(const Int8Group& weights, const Int8Record& row, uint32_t index, float sum) {
  constexpr uint32_t kParts = group_parts(kFormat);
  const Unit low = load_16<Unit>(row.codes(index)), high = load_16<Unit>(row.codes(index) + kUnitBytes);
  const float row_scale = row.scale(index);
  int32_t dots[2] = {0, 0};
  GPU_UNROLL
  for (uint32_t w = 0; w < 4; ++w) {
    dots[0] = dot4(weights.words[w], low.words[w], dots[0]);
    dots[kParts - 1] = dot4(weights.words[4 + w], high.words[w], dots[kParts - 1]);
  }
  GPU_UNROLL
  for (uint32_t p = 0; p < kParts; ++p) sum = fused(static_cast<float>(dots[p]), mul(weights.scales[p], row_scale), sum);
  if constexpr (has_offset(kFormat)) sum = fused(weights.offset, row.scaled_sum(index), sum);
  return sum;
}

template <WeightFormat kFormat, uint32_t kRows>
GPU_FN void int8_chain_sums(const Record& record, const Int8Record* rows, uint32_t num_groups, float* sums) {
  GPU_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) sums[r] = 0.0f;
  const auto step = [&](uint32_t index) {
    Int8Group weights;
    read_codes<kFormat>(record, index, weights);
    GPU_UNROLL
    for (uint32_t r = 0; r < kRows; ++r) sums[r] = group_step<kFormat>(weights, rows[r], index, sums[r]);
  };
  if constexpr (kRows == 1) {
    GPU_UNROLL_4  // loads of groups go ahead of the products of those before
    for (uint32_t index = 0; index < num_groups; ++index) step(index);
  } else {
    GPU_UNROLL_2  // as many as fit the registers of three blocks
    for (uint32_t index = 0; index < num_groups; ++index) step(index);
  }
}

template <WeightFormat kFormat>
GPU_FN void int8_few(const ProjectionParams& params) {
  GPU_SHARED(FewSums, shared);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
  uint32_t units[kFewTileRows];  // where rows begin; slots that do not exist read the last one again
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) units[r] = row_unit(params, tile.first_slot + smaller(r, tile.num_slots - 1));
  few_outputs(params, tile, shared, [&](uint32_t chain, uint32_t matrix, uint64_t panels) {
    const unsigned char* panel = panel_of<kFormat>(params, tile.expert, panels, block_x());
    const Record record{panel + chain * chain_bytes(kFormat) + lane_index() * kUnitBytes};
    Int8Record chain_rows[kFewTileRows];
    GPU_UNROLL
    for (uint32_t r = 0; r < kFewTileRows; ++r) chain_rows[r] = {params.codes, units[r] + chain * kInt8RecordUnits};
    const uint32_t num_groups = (smaller(kChain, params.num_inputs - chain * kChain) + kGroup - 1) / kGroup;
    float sums[kFewTileRows] = {};
    if (tile.num_slots == 1) int8_chain_sums<kFormat, 1>(record, chain_rows, num_groups, sums);
    else int8_chain_sums<kFormat, kFewTileRows>(record, chain_rows, num_groups, sums);
    GPU_UNROLL
    for (uint32_t r = 0; r < kFewTileRows; ++r) shared.chain(matrix, subgroup_index(), r) = sums[r];
  });
}

}  // namespace dflash::compute::gpu
