// The resident layout of numerics classes bf16-dot and bf16-bfdot: panels as in pack.h, but a
// 32-bit word holds two inputs of one output (ascending, the lower in the low half), so that a
// vector of words feeds a pair-wise dot product. An odd last input stands alone, 16 bits per
// output: sizes are those of pack.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// As pack_panel; matrix and `format` are bf16.
void pack_bf16_pairs(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                     std::byte* packed);

// How rows reach the kernels: bf16, padded with a zero to whole pairs.
size_t bf16_row_bytes(uint32_t count);
void encode_bf16_row(const float* from, uint32_t count, std::byte* to);

}  // namespace dflash::compute
