// The resident layout of a weight matrix: panels of `panel_width` outputs. Inside a panel the
// weights lie input by input (k-major), so that a tile of rows and a single row both stream it in
// one direction. The bf16 elements of one input alternate between the lower and the upper half of
// the panel (0, w/2, 1, w/2+1, ...), so that a shift and a mask widen them to two float32 vectors.
// Quantised formats have the layout of panel_layout.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

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

}  // namespace dflash::compute
