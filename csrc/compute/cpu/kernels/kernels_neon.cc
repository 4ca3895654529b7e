// The kernels of f32-canonical for NEON, which every AArch64 has: weights of every format are
// widened to float32.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kNeonCanonical = make_canonical_set<NeonVector>();

}  // namespace dflash::compute
#endif
