// The kernels that compute one lane at a time, for every processor, on float32 weights.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kScalarCanonical = make_canonical_set<ScalarVector>();

}  // namespace dflash::compute
