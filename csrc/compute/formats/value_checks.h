// Whether stored weights can be kept in a resident format, and whether their values are finite.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// What the values of a stored matrix must not hold, because no finite result could come of it: NaN
// or infinity among the scales of a quantised format, or anywhere where weights are quantised at
// load. Errors: kCheckpoint naming tensor, output and input. Outputs [first_output, first_output +
// num_outputs).
Status check_values(const char* name, const MatrixView& matrix, WeightFormat resident,
                    uint32_t first_output, uint32_t num_outputs);

// Which stored formats a resident one takes: itself; f32 takes all, int8_g32 and int4_g32 take
// floats. Errors: kUnsupported.
Status check_resident(const char* name, const MatrixView& matrix, WeightFormat resident);

}  // namespace dflash::compute
