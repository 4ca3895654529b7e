// What int8_few.h and dot2_few.h share: chains of dot products over 32 inputs, in the blocks of
// project_few.h. Their template argument `Codes` says what a group of weights is and how it is
// taken from a stored one (Group, take()), what a row's record is (Record), and how a group
// continues a chain (step()).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_rows.h"
#include "cards/kernels/project_few.h"

namespace dflash::compute::gpu {

// How many groups a thread loads ahead, as few_ahead() of project_few.h says. There is less work
// per weight here, so with one row it is more: 96 bytes of four-bit codes, or 128 of eight-bit
// ones.
DFLASH_GPU_BOTH constexpr uint32_t codes_ahead(WeightFormat format, uint32_t num_rows) {
  return groups_ahead(format, num_rows == 1 ? 40 : 32, 6);
}

template <class Codes, WeightFormat kFormat, uint32_t kRows>
GPU_FN void code_chain_sums(const Record& record, const typename Codes::Record* rows,
                            uint32_t num_groups, float* sums) {
  constexpr uint32_t kAhead = codes_ahead(kFormat, kRows);  // groups loaded ahead
  GPU_UNROLL
  for (uint32_t r = 0; r < kRows; ++r) sums[r] = 0.0f;
  StoredGroup<kFormat> ahead[kAhead] = {};
  GPU_UNROLL
  for (uint32_t i = 0; i < kAhead; ++i) {
    if (i < num_groups) ahead[i] = load_group<kFormat>(record, i);
  }
  for (uint32_t first = 0; first < num_groups; first += kAhead) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kAhead; ++i) {
      const uint32_t index = first + i;
      if (index >= num_groups) break;
      const typename Codes::Group weights = Codes::template take<kFormat>(ahead[i], index);
      if (index + kAhead < num_groups) ahead[i] = load_group<kFormat>(record, index + kAhead);
      GPU_UNROLL
      for (uint32_t r = 0; r < kRows; ++r)
        sums[r] = Codes::template step<kFormat>(weights, rows[r], index, sums[r]);
    }
  }
}

// Computes a chain of one matrix for the tile's rows and leaves the sums in shared memory.
template <class Codes, WeightFormat kFormat>
GPU_FN void store_code_chain(const ProjectionParams& params, uint32_t chain, uint32_t matrix,
                             uint64_t panels, FewSums& shared) {
  const unsigned char* panel =
      panel_of<kFormat>(params, shared.tile.at(0).expert, panels, block_x());
  const Record record{panel + chain * chain_bytes(kFormat) + lane_index() * kUnitBytes};
  typename Codes::Record rows[kFewTileRows];
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) {
    rows[r] = {params.codes, (shared.rows.at(r) * num_chains(params.num_inputs) + chain) *
                                 Codes::Record::kRecordUnits};
  }
  const uint32_t num_groups =
      (smaller(kChain, params.num_inputs - chain * kChain) + kGroup - 1) / kGroup;
  float sums[kFewTileRows] = {};
  if (shared.tile.at(0).num_slots == 1)
    code_chain_sums<Codes, kFormat, 1>(record, rows, num_groups, sums);
  else
    code_chain_sums<Codes, kFormat, kFewTileRows>(record, rows, num_groups, sums);
  GPU_UNROLL
  for (uint32_t r = 0; r < kFewTileRows; ++r) shared.chain(matrix, subgroup_index(), r) = sums[r];
}

template <class Codes, WeightFormat kFormat>
GPU_FN void codes_few(const ProjectionParams& params) {
  GPU_SHARED(FewSums, shared);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  few_outputs(params, shared, [&](uint32_t chain, uint32_t matrix, uint64_t panels) {
    store_code_chain<Codes, kFormat>(params, chain, matrix, panels, shared);
  });
}

}  // namespace dflash::compute::gpu
