// The peak loops for neon.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "measure/peak_loops.h"

namespace dflash::measure {

constinit const PeakLoops kNeonPeaks = make_peak_loops<compute::NeonVector>();

}  // namespace dflash::measure
#endif
