// The rows of a request as float32, straight from the wire's layout.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernel_params.h"
#include "compute/gpu/kernels/convert_floats.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kElementThreads = 256;  // per block, one element each

// A batch has fewer than 2^32 elements (GpuLayer cuts it by bytes, and AMD's grids have no more
// threads), so that a place divides in 32 bits: in 64 the division would cost more than the rest of
// an element.
GPU_FN uint64_t flat_index() { return uint64_t{block_x()} * block_threads() + thread_index(); }

GPU_KERNEL(dflash_widen_rows, WidenParams, kElementThreads) {
  const uint64_t i = flat_index();
  if (i >= uint64_t{params.num_rows} * params.row_size) return;
  const uint32_t row = static_cast<uint32_t>(i) / params.row_size,
                 column = static_cast<uint32_t>(i) % params.row_size;
  float& wide = params.rows[uint64_t{row} * params.row_stride + column];
  // volatile: the source may change under us, and must not be read a second time.
  if (params.dtype == Dtype::kF32)
    wide = float_of(static_cast<const volatile uint32_t*>(params.source)[i]);
  else
    wide = widen_16(params.dtype, static_cast<const volatile uint16_t*>(params.source)[i]);
}

}  // namespace dflash::compute::gpu
