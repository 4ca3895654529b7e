// The kernels of paged attention and of rows for AVX2, FMA and F16C.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "compute/cpu/kernels/attention_tiles.h"
#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const AttentionKernels kAvx2Attention = make_attention_kernels<Avx2Vector>();
constinit const RowKernels kAvx2Rows = make_row_kernels<Avx2Vector>();

}  // namespace dflash::compute
#endif
