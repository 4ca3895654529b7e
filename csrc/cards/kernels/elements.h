// The launch shape of kernels that have a thread per element of an array.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kElementThreads = 256;  // per block, one element each

// The element of this thread. A batch has fewer than 2^32 elements (GpuLayer cuts it by bytes, and
// AMD's grids have no more threads), so that its callers may divide the place in 32 bits: in 64 the
// division would cost more than the rest of an element.
GPU_FN uint64_t flat_index() { return uint64_t{block_x()} * block_threads() + thread_index(); }

}  // namespace dflash::compute::gpu
