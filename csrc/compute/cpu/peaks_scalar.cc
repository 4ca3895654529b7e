// The peak loops for scalar.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "compute/cpu/peak_loops.h"

namespace dflash::compute {

constinit const PeakLoops kScalarPeaks = make_peak_loops<ScalarVector>();

}  // namespace dflash::compute
