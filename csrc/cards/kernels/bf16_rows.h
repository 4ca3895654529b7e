// Converts the rows of a request, as they arrived, to bf16, which is what the matrix-unit classes
// multiply.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/elements.h"

namespace dflash::compute::gpu {

// A thread per element of the padded rows; the padding is zeros.
GPU_KERNEL(dflash_narrow_rows, NarrowParams, kElementThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_rows} * params.row_stride) return;
  const uint32_t row = static_cast<uint32_t>(i) / params.row_stride,
                 column = static_cast<uint32_t>(i) % params.row_stride;
  uint32_t half = 0;
  if (column < params.row_size) {
    const uint64_t at = uint64_t{row} * params.row_size + column;
    // volatile: a peer may change the source meanwhile, so it must not be read a second time.
    if (params.dtype == Dtype::kF32)
      half = narrow_bf16(float_of(static_cast<const volatile uint32_t*>(params.source)[at]));
    else
      half = narrow_bf16(
          widen_16(params.dtype, static_cast<const volatile uint16_t*>(params.source)[at]));
  }
  params.rows[i] = static_cast<uint16_t>(half);
}

}  // namespace dflash::compute::gpu
