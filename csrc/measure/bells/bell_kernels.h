// The table of the kernels that measure; there is only one. For host code.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_entries.h"
#include "measure/bells/bell_params.h"

namespace dflash::measure {

inline constexpr compute::gpu::KernelId kRingBells{0};
inline constexpr compute::gpu::KernelEntry kBellKernels[] = {
    {"dflash_ring_bells", sizeof(BellParams), 0}
};

}  // namespace dflash::measure
