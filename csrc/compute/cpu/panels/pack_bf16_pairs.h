// The resident layout of numerics classes bf16-dot and bf16-bfdot. Panels are those of pack.h, but
// a 32-bit word holds two inputs of one output (the lower input in the low half), because the
// instructions of both classes multiply pairs. An odd last input stands alone with 16 bits per
// output, so that a panel has as many bytes as in pack.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Packs one panel as pack_panel does; the matrix and `format` are both bf16.
void pack_bf16_pairs(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                     std::byte* packed);

// Rows reach the kernels as bf16, padded with a zero to whole pairs: `count` values take
// bf16_row_bytes(count) bytes.
size_t bf16_row_bytes(uint32_t count);
void encode_bf16_row(const float* from, uint32_t count, std::byte* to);

}  // namespace dflash::compute
