// The kernels of f32-canonical for AVX-512 (F, BW, VL, DQ): weights of every format are widened to
// float32.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kAvx512Canonical = make_canonical_set<Avx512Vector>();

}  // namespace dflash::compute
#endif
