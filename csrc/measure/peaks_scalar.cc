// The peak loops for scalar.
// SPDX-License-Identifier: Apache-2.0
#include "compute/vector_scalar.h"

#include "measure/peak_loops.h"

namespace dflash::measure {

constinit const PeakLoops kScalarPeaks = make_peak_loops<compute::ScalarVector>();

}  // namespace dflash::measure
