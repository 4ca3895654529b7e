// The kernels of f32-canonical for AVX2, FMA and F16C: weights of every format are widened to
// float32.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kAvx2Canonical = make_canonical_set<Avx2Vector>();

}  // namespace dflash::compute
#endif
