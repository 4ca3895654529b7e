// The kernels for NEON, which every AArch64 has, on float32 weights.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kNeonCanonical = make_canonical_set<NeonVector>();

}  // namespace dflash::compute
#endif
