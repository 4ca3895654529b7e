// The peak loops for neon.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/peak_loops.h"

namespace dflash::compute {

constinit const PeakLoops kNeonPeaks = make_peak_loops<NeonVector>();

}  // namespace dflash::compute
#endif
