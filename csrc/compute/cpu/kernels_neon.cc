// The expert kernels for NEON, part of every AArch64.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/vector_neon.h"

#include "compute/cpu/kernel_body.h"

namespace dflash::compute {

constinit const KernelSet kNeonKernels = make_canonical_set<NeonVector>();

}  // namespace dflash::compute
#endif
