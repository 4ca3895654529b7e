// The sum of a call: for each token the shards' rows in ascending id, in float32 from +0, rounded
// once to the tensors' dtype.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/pack_requests.h"
#include "compute/gpu/kernels/widen_rows.h"

namespace dflash::compute::gpu {

static_assert(kElementThreads == kStepThreads, "one launch shape for the kernels of a step");

// A thread per element of the output. What a failed step leaves in it is not read.
GPU_KERNEL(dflash_combine_replies, StepParams, kStepThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_tokens} * params.out_size ||
      load_volatile(&params.state->error) != 0)
    return;
  const uint32_t token = static_cast<uint32_t>(i / params.out_size),
                 column = static_cast<uint32_t>(i % params.out_size);
  float sum = 0.0f;
  for (uint32_t place = 0; place < params.num_shards; ++place) {
    const uint32_t row = params.row_places[place * kMostStepTokens + token];
    if (row == kNoRow) continue;
    const unsigned char* rows =
        params.incoming + place * params.incoming_stride + kFrameBytes + kTimingBytes;
    const uint64_t at = uint64_t{row} * params.out_size + column;
    sum = add(sum, params.reply_dtype == Dtype::kF32
                       ? reinterpret_cast<const float*>(rows)[at]
                       : widen_16(params.reply_dtype, reinterpret_cast<const uint16_t*>(rows)[at]));
    // as the CPU's client: one NaN, whatever its payload was
    if (is_nan(sum)) sum = float_of(0x7fc00000u);
  }
  if (params.dtype == Dtype::kF32) {
    static_cast<float*>(params.output)[i] = sum;
    return;
  }
  const uint32_t narrow = params.dtype == Dtype::kF16 ? narrow_f16(sum) : narrow_bf16(sum);
  static_cast<uint16_t*>(params.output)[i] = static_cast<uint16_t>(narrow);
  if (is_finite(sum) && !is_finite(widen_16(params.dtype, narrow))) {
    fail_step(*params.state, static_cast<uint32_t>(StepCode::kRange), 0xffffu, params.call_index,
              token);
  }
}

}  // namespace dflash::compute::gpu
