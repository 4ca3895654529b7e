// The kernels of paged attention and of rows that compute one lane at a time, for every processor.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/kernels/attention_tiles.h"
#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const AttentionKernels kScalarAttention = make_attention_kernels<ScalarVector>();
constinit const RowKernels kScalarRows = make_row_kernels<ScalarVector>();

}  // namespace dflash::compute
