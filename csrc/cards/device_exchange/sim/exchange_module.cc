// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include "cards/device_exchange/sim/exchange_module.h"

#include "cards/device_exchange/exchange_kernels.h"
#include "cards/device_exchange/kernels/all.h"

namespace dflash::device_exchange {
namespace {

// In the order of kExchangeKernels.
constexpr compute::gpu::sim::Kernel kFunctions[] = {
    &compute::gpu::sim::call<StepParams, &dflash_pack_requests>,
    &compute::gpu::sim::call<StepParams, &dflash_await_replies>,
    &compute::gpu::sim::call<StepParams, &dflash_combine_replies>,
};

}  // namespace

compute::gpu::sim::Module exchange_module() { return {kExchangeKernels, kFunctions}; }

}  // namespace dflash::device_exchange
