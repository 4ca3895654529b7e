// The kernel that rings, compiled for the CPU.
// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include "measure/bells/sim_bells.h"

#include "measure/bells/gpu_bells.h"
#include "measure/bells/ring_bells.h"

namespace dflash::measure {
namespace {

constexpr compute::gpu::sim::Kernel kFunctions[] = {
    &compute::gpu::sim::call<BellParams, &dflash_ring_bells>};

}  // namespace

compute::gpu::sim::Module bell_module() { return {kBellKernels, kFunctions}; }

}  // namespace dflash::measure
