// The resident layout of a weight matrix: panels of `panel_width` outputs. Inside a panel the
// weights lie input by input (k-major), so that a tile of rows and a single row both stream it in
// one direction. The bf16 elements of one input alternate between the lower and the upper half of
// the panel (0, w/2, 1, w/2+1, ...), so that a shift and a mask widen them to two float32 vectors.
// Quantised formats have the layout of panel_layout.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/formats/matrix_view.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute {

// Bytes of one panel of `width` outputs.
size_t panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width);

// Packs panel `panel`, that is outputs [panel * width, (panel + 1) * width) of `matrix`, to
// `packed`, which has panel_bytes() bytes. Lanes past the last output become zeros. `format` is a
// resident format that check_resident allows for the matrix.
void pack_panel(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                std::byte* packed);

// Where output `o` of a panel lies within the packed step of one input of a float format;
// `alternates` is true for bf16.
constexpr uint32_t place_in_step(uint32_t o, uint32_t width, bool alternates) {
  if (!alternates) return o;
  return o < width / 2 ? 2 * o : 2 * (o - width / 2) + 1;
}

// The same two functions for quantised formats, called by the two above.
size_t quantized_panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width);
void pack_quantized_panel(const MatrixView& matrix, WeightFormat format, uint32_t first_output,
                          uint32_t width, std::byte* packed);

// The resident layout of numerics classes bf16-dot and bf16-bfdot. Panels are those of pack_panel,
// but a 32-bit word holds two inputs of one output (the lower input in the low half), because the
// instructions of both classes multiply pairs. An odd last input stands alone with 16 bits per
// output, so that a panel has as many bytes as there.

// Packs one panel as pack_panel does; the matrix and `format` are both bf16.
void pack_bf16_pairs(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                     std::byte* packed);

// Rows reach the kernels as bf16, padded with a zero to whole pairs: `count` values take
// bf16_row_bytes(count) bytes.
size_t bf16_row_bytes(uint32_t count);
void encode_bf16_row(const float* from, uint32_t count, std::byte* to);

// Reads single outputs back out of panels: an embedding takes its rows from the one packed store.
// One output is one lane of a panel, so that its elements lie a step apart; reading 4,096 inputs
// touches each line of the panel, a few hundred KiB.

// Where one output lies.
struct PackedOutput {
  const std::byte* panel;
  WeightFormat format;
  uint32_t width;  // of the panel
  uint32_t lane;   // of the output, less than the width
  uint32_t inputs;
};

// Writes the `inputs` weights of an output to `values`, with the bits that dequantize() gives.
// The caller holds a CanonicalFloatMode.
void unpack_output(const PackedOutput& output, float* values);
// The same for a panel of pack_bf16_pairs.
void unpack_bf16_pairs(const PackedOutput& output, float* values);

}  // namespace dflash::compute
