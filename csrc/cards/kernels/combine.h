// Computes the reply: for each row y = fma(weight, output of the expert, y) over its slots, experts
// ascending. The result is rounded once to the reply's dtype, and checked against its range.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/elements.h"

namespace dflash::compute::gpu {

// A thread per element of the reply.
GPU_KERNEL(dflash_combine, CombineParams, kElementThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_rows} * params.out_size) return;
  const uint32_t row = static_cast<uint32_t>(i) / params.out_size,
                 column = static_cast<uint32_t>(i) % params.out_size;
  float sum = 0.0f;
  for (uint32_t at = params.row_begins[row]; at < params.row_begins[row + 1]; ++at) {
    const uint32_t slot = params.row_slots[at];
    sum = fused(params.weights[params.slot_pairs[slot]],
                params.downs[uint64_t{slot} * params.out_size + column], sum);
  }
  if (is_nan(sum)) sum = float_of(0x7fc00000u);  // one NaN, whatever payload an fma kept
  if (params.dtype == Dtype::kF32) {
    static_cast<float*>(params.reply)[i] = sum;
    return;
  }
  const bool is_f16 = params.dtype == Dtype::kF16;
  const uint32_t narrow = is_f16 ? narrow_f16(sum) : narrow_bf16(sum);
  static_cast<uint16_t*>(params.reply)[i] = static_cast<uint16_t>(narrow);
  if (is_finite(sum) && !is_finite(widen_16(params.dtype, narrow)))
    atomic_min(params.first_out_of_range, i);
}

}  // namespace dflash::compute::gpu
