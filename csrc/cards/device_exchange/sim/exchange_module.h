// The kernels of a device step compiled for the CPU: what a simulated device of the host runs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/sim/sim_kernels.h"

namespace dflash::device_exchange {

compute::gpu::sim::Module exchange_module();  // of kExchangeKernels

}  // namespace dflash::device_exchange
