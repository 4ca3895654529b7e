// Whether stored weights can be kept in a resident format, and whether their values are finite.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Checks that a matrix is in a format that checkpoints have, that its rows are whole blocks, and
// that its scales are there. Errors: kInvalidArgument; kUnsupported for rows of other lengths.
Status check_stored(const char* name, const MatrixView& matrix);

// Checks outputs [first_output, first_output + num_outputs) of a stored matrix for what allows no
// finite result: NaN or infinity among the scales of a quantised format, or anywhere where weights
// are quantised at load. Errors: kCheckpoint naming tensor, output and input.
Status check_values(const char* name, const MatrixView& matrix, WeightFormat resident,
                    uint32_t first_output, uint32_t num_outputs);

// Checks that a resident format can hold the stored one exactly: each takes itself, f32 takes all,
// and int8_g32 and int4_g32 take floats. Errors: kUnsupported.
Status check_resident(const char* name, const MatrixView& matrix, WeightFormat resident);

// Checks that kernels read panels of a resident format (has_panels). Errors: kUnsupported.
Status check_panels(const char* name, WeightFormat resident);

}  // namespace dflash::compute
