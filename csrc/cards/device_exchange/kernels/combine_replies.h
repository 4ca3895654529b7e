// Combines the replies of a call: for each token the shards' rows are added in ascending id, in
// float32 from +0 on, and the sum is rounded once to the tensors' dtype.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/kernels/step_failures.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/elements.h"
#include "wire/frame_layout.h"
#include "wire/payload_layout.h"

namespace dflash::device_exchange {

static_assert(kElementThreads == kStepThreads, "one launch shape for the kernels of a step");

// A thread per element of the output. Nobody reads what a failed step leaves there.
GPU_KERNEL(dflash_combine_replies, StepParams, kStepThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_tokens} * params.out_size ||
      load_volatile(&params.state->error) != 0)
    return;
  const uint32_t token = static_cast<uint32_t>(i / params.out_size),
                 column = static_cast<uint32_t>(i % params.out_size);
  constexpr uint64_t kRowsOffset = wire::ReplyOffsets{}.rows_offset;
  float sum = 0.0f;
  for (uint32_t place = 0; place < params.num_shards; ++place) {
    const uint32_t row = params.row_places[place * kMostStepTokens + token];
    if (row == kNoRow) continue;
    const unsigned char* rows =
        params.incoming + place * params.incoming_stride + wire::kFrameHeaderBytes + kRowsOffset;
    const uint64_t at = uint64_t{row} * params.out_size + column;
    sum = add(sum, params.reply_dtype == Dtype::kF32
                       ? reinterpret_cast<const float*>(rows)[at]
                       : widen_16(params.reply_dtype, reinterpret_cast<const uint16_t*>(rows)[at]));
    // One NaN, whatever its payload was, as the client on the processor has it.
    if (is_nan(sum)) sum = float_of(0x7fc00000u);
  }
  if (params.dtype == Dtype::kF32) {
    static_cast<float*>(params.output)[i] = sum;
    return;
  }
  const uint32_t narrow = params.dtype == Dtype::kF16 ? narrow_f16(sum) : narrow_bf16(sum);
  static_cast<uint16_t*>(params.output)[i] = static_cast<uint16_t>(narrow);
  if (is_finite(sum) && !is_finite(widen_16(params.dtype, narrow))) {
    fail_step(*params.state, ErrorCode::kRange, kNoPlace, params.call_index, token);
  }
}

}  // namespace dflash::device_exchange
