// The readable twin of the packed linear layer (operators/linear.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "compute/operators/linear.h"

namespace dflash::compute {

// Computes out [num_rows, outputs of all parts] from rows and, where there is one, a residual, as
// operators/linear.h has it; the class of a part is part_numerics'. Errors: those of check_parts,
// check_linear_rows and class_matrix, and kRange for the first value that is infinite only in the
// dtype of `out`.
Status reference_linear(std::span<const LinearPart> parts, NumericsClass numerics,
                        const RowsView& rows, const RowsTarget& out,
                        const RowsView* residual = nullptr);

}  // namespace dflash::compute
