// The table of the experts' kernels, generated from the lists in kernel_table.h.
// SPDX-License-Identifier: Apache-2.0
#include "cards/kernel_table.h"

#include "cards/kernel_entries.h"
#include "cards/kernel_params.h"

namespace dflash::compute::gpu {
namespace {

constexpr uint32_t dynamic_bytes_of(WeightKernel kernel) {
  return kernel == WeightKernel::k_bf16_wgmma ? kWgmmaSharedBytes : 0;
}

constexpr KernelEntry kEntries[kNumKernels] = {
#define DFLASH_GPU_PLAIN_ENTRY(stem) {"dflash_" #stem, sizeof(PlainParams_##stem), 0},
    DFLASH_GPU_PLAIN_KERNELS(DFLASH_GPU_PLAIN_ENTRY)
#define DFLASH_GPU_FORMAT_ENTRY(stem, enumerator, name) \
  {"dflash_" #stem "_" #name, sizeof(ProjectionParams), dynamic_bytes_of(WeightKernel::k_##stem)},
#define DFLASH_GPU_WEIGHT_ENTRY(stem) DFLASH_GPU_FORMATS(DFLASH_GPU_FORMAT_ENTRY, stem)
        DFLASH_GPU_WEIGHT_KERNELS(DFLASH_GPU_WEIGHT_ENTRY)
#define DFLASH_GPU_INTEGER_FORMAT_ENTRY(stem, enumerator, name) \
  {"dflash_" #stem "_" #name, sizeof(ProjectionParams), 0},
#define DFLASH_GPU_INTEGER_ENTRY(stem) \
  DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_INTEGER_FORMAT_ENTRY, stem)
            DFLASH_GPU_INTEGER_KERNELS(DFLASH_GPU_INTEGER_ENTRY)};

}  // namespace

KernelTable expert_kernels() { return kEntries; }

}  // namespace dflash::compute::gpu
