// The row kernels that compute one lane at a time, for every processor.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const RowKernels kScalarRows = make_row_kernels<ScalarVector>();

}  // namespace dflash::compute
