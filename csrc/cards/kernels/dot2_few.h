// The kernel of gate, up and down in class f16-dot2 for experts with few rows. Blocks and chains
// are those of project_few.h; each chain is made of dot products over 32 inputs, with the
// instructions of dot2_many.h in the same order, so that both kernels have the same bits. A weight
// in bf16 takes six instructions (widen, compare, scale, round, half a pack, half a dot2 per row),
// which is less than a gfx906 has time for while it reads one.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/codes_few.h"
#include "cards/kernels/dot2_rows.h"

namespace dflash::compute::gpu {

struct Dot2Few {
  using Group = HalfGroup;
  using Record = HalfRecord;

  template <WeightFormat kFormat>
  GPU_FN static HalfGroup take(const StoredGroup<kFormat>& stored, uint32_t index) {
    return half_group<kFormat>(stored, index);
  }

  template <WeightFormat kFormat>
  GPU_FN static float step(const HalfGroup& weights, const HalfRecord& row, uint32_t index,
                           float sum) {
    constexpr uint32_t kParts = group_parts(kFormat), kUnits = kGroupPairs / 4;
    const float row_scale = row.scale(index);
    float dots[kParts] = {};
    GPU_UNROLL
    for (uint32_t u = 0; u < kUnits; ++u) {
      const Unit codes = load_device_16<Unit>(row.codes(index) + u * kUnitBytes);
      GPU_UNROLL
      for (uint32_t w = 0; w < 4; ++w)
        dots[u * kParts / kUnits] =
            dot2(codes.words[w], weights.words[4 * u + w], dots[u * kParts / kUnits]);
    }
    float row_sums[2] = {};
    if constexpr (has_half_offsets(kFormat))
      scaled_half_sums(row, index, row_sums);
    else if constexpr (has_offset(kFormat))
      row_sums[0] = row.scaled_sum(index);
    GPU_UNROLL
    for (uint32_t p = 0; p < kParts; ++p) {
      sum = fused(dots[p], mul(weights.scales[p], row_scale), sum);
      if constexpr (has_offset(kFormat)) sum = fused(weights.offsets[p], row_sums[p], sum);
    }
    return sum;
  }
};

template <WeightFormat kFormat>
GPU_FN void dot2_few(const ProjectionParams& params) {
  if constexpr (kHasDot2)
    codes_few<Dot2Few, kFormat>(params);
  else
    stop_kernel();
}

}  // namespace dflash::compute::gpu
