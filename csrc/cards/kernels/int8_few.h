// The kernel of gate, up and down in class int8-groups for experts with few rows. Blocks and chains
// are those of project_few.h; each chain is made of integer dot products over 32 inputs. The bits
// are those of int8_many.h and of the processor.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/codes_few.h"
#include "cards/kernels/int8_codes.h"

namespace dflash::compute::gpu {

struct Int8Few {
  using Group = Int8Group;
  using Record = Int8Record;

  template <WeightFormat kFormat>
  GPU_FN static Int8Group take(const StoredGroup<kFormat>& stored, uint32_t index) {
    return codes_of<kFormat>(stored, index);
  }

  // The dot products are exact; every operation after them rounds once.
  template <WeightFormat kFormat>
  GPU_FN static float step(const Int8Group& weights, const Int8Record& row, uint32_t index,
                           float sum) {
    constexpr uint32_t kParts = group_parts(kFormat);
    const Unit low = load_device_16<Unit>(row.codes(index)),
               high = load_device_16<Unit>(row.codes(index) + kUnitBytes);
    const float row_scale = row.scale(index);
    int32_t dots[2] = {0, 0};
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) {
      dots[0] = dot4(weights.words[w], low.words[w], dots[0]);
      dots[kParts - 1] = dot4(weights.words[4 + w], high.words[w], dots[kParts - 1]);
    }
    float row_sums[2] = {};
    if constexpr (has_half_offsets(kFormat))
      scaled_half_sums(row, index, row_sums);
    else if constexpr (has_offset(kFormat))
      row_sums[0] = row.scaled_sum(index);
    GPU_UNROLL
    for (uint32_t p = 0; p < kParts; ++p) {
      sum = fused(static_cast<float>(dots[p]), mul(weights.scales[p], row_scale), sum);
      if constexpr (has_offset(kFormat)) sum = fused(weights.offsets[p], row_sums[p], sum);
    }
    return sum;
  }
};

template <WeightFormat kFormat>
GPU_FN void int8_few(const ProjectionParams& params) {
  codes_few<Int8Few, kFormat>(params);
}

}  // namespace dflash::compute::gpu
