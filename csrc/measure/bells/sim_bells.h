// The simulator's side of a doorbell: the kernel compiled for the CPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/sim/sim_runtime.h"

namespace dflash::measure {

compute::gpu::sim::Module bell_module();

}  // namespace dflash::measure
