// Converts the rows of a request, as they arrived, to float32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/convert_floats.h"
#include "cards/kernels/elements.h"

namespace dflash::compute::gpu {

GPU_KERNEL(dflash_widen_rows, WidenParams, kElementThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_rows} * params.row_size) return;
  const uint32_t row = static_cast<uint32_t>(i) / params.row_size,
                 column = static_cast<uint32_t>(i) % params.row_size;
  float& wide = params.rows[uint64_t{row} * params.row_stride + column];
  // volatile: a peer may change the source meanwhile, so it must not be read a second time.
  if (params.dtype == Dtype::kF32)
    wide = float_of(static_cast<const volatile uint32_t*>(params.source)[i]);
  else
    wide = widen_16(params.dtype, static_cast<const volatile uint16_t*>(params.source)[i]);
}

}  // namespace dflash::compute::gpu
