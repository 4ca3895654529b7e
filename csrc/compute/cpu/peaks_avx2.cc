// The peak loops for avx2.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "compute/cpu/peak_loops.h"

namespace dflash::compute {

constinit const PeakLoops kAvx2Peaks = make_peak_loops<Avx2Vector>();

}  // namespace dflash::compute
#endif
