// The kernels of paged attention and of rows for AVX-512 (F, BW, VL, DQ).
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/kernels/attention_tiles.h"
#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const AttentionKernels kAvx512Attention = make_attention_kernels<Avx512Vector>();
constinit const RowKernels kAvx512Rows = make_row_kernels<Avx512Vector>();

}  // namespace dflash::compute
#endif
