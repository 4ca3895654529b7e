// The expert kernels for AVX2, FMA and F16C.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/vector_avx2.h"

#include "compute/cpu/kernel_body.h"

namespace dflash::compute {

constinit const KernelSet kAvx2Kernels = make_canonical_set<Avx2Vector>();

}  // namespace dflash::compute
#endif
