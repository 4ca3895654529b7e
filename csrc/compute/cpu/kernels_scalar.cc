// The expert kernels for one lane at a time, for every processor.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/vector_scalar.h"

#include "compute/cpu/kernel_body.h"

namespace dflash::compute {

constinit const KernelSet kScalarKernels = make_canonical_set<ScalarVector>();

}  // namespace dflash::compute
