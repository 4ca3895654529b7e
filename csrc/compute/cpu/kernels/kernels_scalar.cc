// The kernels of f32-canonical that compute one lane at a time, for every processor: weights of
// every format are widened to float32.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/kernels/canonical_products.h"

namespace dflash::compute {

constinit const KernelSet kScalarCanonical = make_canonical_set<ScalarVector>();

}  // namespace dflash::compute
