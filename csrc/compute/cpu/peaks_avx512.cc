// The peak loops for avx512.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/peak_loops.h"

namespace dflash::compute {

constinit const PeakLoops kAvx512Peaks = make_peak_loops<Avx512Vector>();

}  // namespace dflash::compute
#endif
