// The expert kernels for AVX-512 (F, BW, VL, DQ).
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/vector_avx512.h"

#include "compute/cpu/kernel_body.h"

namespace dflash::compute {

constinit const KernelSet kAvx512Kernels = make_canonical_set<Avx512Vector>();

}  // namespace dflash::compute
#endif
