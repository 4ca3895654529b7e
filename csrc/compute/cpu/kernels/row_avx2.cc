// The row kernels for AVX2, FMA and F16C.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "compute/cpu/kernels/row_kernels.h"

namespace dflash::compute {

constinit const RowKernels kAvx2Rows = make_row_kernels<Avx2Vector>();

}  // namespace dflash::compute
#endif
