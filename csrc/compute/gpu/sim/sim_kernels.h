// The simulator's module: the kernels as functions, in the order of kernel_table.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernel_table.h"
#include "compute/gpu/sim/block.h"

namespace dflash::compute::gpu::sim {

Kernel find_kernel(KernelId kernel);

}  // namespace dflash::compute::gpu::sim
