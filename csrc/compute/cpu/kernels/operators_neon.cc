// The kernels of paged attention and of rows for NEON, which every AArch64 has.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/attention_tiles.h"
#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const AttentionKernels kNeonAttention = make_attention_kernels<NeonVector>();
constinit const RowKernels kNeonRows = make_row_kernels<NeonVector>();

}  // namespace dflash::compute
#endif
