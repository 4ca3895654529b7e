// The resident layout of a weight matrix: panels of `panel_width` outputs, inside a panel input by
// input (k-major), so that both a row tile and a single row stream it linearly. bf16 elements of
// one step alternate between the lower and the upper half of the panel (0, w/2, 1, w/2+1, ...): a
// shift and a mask then widen a whole step. Quantised formats: panel_layout.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Bytes of one panel of `width` outputs.
size_t panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width);

// Packs panel `panel` (outputs [panel*width, ...)) of `matrix` to `packed`, panel_bytes() long;
// outputs past the end become zeros. `format` is a resident one that check_resident allows for the
// matrix.
void pack_panel(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                std::byte* packed);

// The two for quantised formats; private to packing.
size_t quantized_panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width);
void pack_quantized_panel(const MatrixView& matrix, WeightFormat format, uint32_t first_output,
                          uint32_t width, std::byte* packed);

}  // namespace dflash::compute
