// The experts' kernels compiled for the CPU, over the simulator's threads.
// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include "cards/sim/sim_kernels.h"

#include "cards/kernels/all.h"

namespace dflash::compute::gpu::sim {
namespace {

constexpr Kernel kKernels[kNumKernels] = {
#define DFLASH_GPU_PLAIN_ENTRY(stem) &call<PlainParams_##stem, &dflash_##stem>,
    DFLASH_GPU_PLAIN_KERNELS(DFLASH_GPU_PLAIN_ENTRY)
#define DFLASH_GPU_FORMAT_ENTRY(stem, enumerator, name) \
  &call<ProjectionParams, &dflash_##stem##_##name>,
#define DFLASH_GPU_WEIGHT_ENTRY(stem) DFLASH_GPU_FORMATS(DFLASH_GPU_FORMAT_ENTRY, stem)
        DFLASH_GPU_WEIGHT_KERNELS(DFLASH_GPU_WEIGHT_ENTRY)
#define DFLASH_GPU_INTEGER_ENTRY(stem) DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_FORMAT_ENTRY, stem)
            DFLASH_GPU_INTEGER_KERNELS(DFLASH_GPU_INTEGER_ENTRY)};

}  // namespace

Module expert_module() { return {expert_kernels(), kKernels}; }

}  // namespace dflash::compute::gpu::sim
