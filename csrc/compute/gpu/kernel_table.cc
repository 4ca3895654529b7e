// Names and parameter sizes of the kernels, generated from the lists in kernel_table.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/gpu/kernel_table.h"

#include "compute/gpu/host_params.h"
#include "compute/gpu/kernel_params.h"

namespace dflash::compute::gpu {
namespace {

struct Entry {
  const char* name;
  size_t params_bytes;
};

constexpr Entry kEntries[kNumKernels] = {
#define DFLASH_GPU_PLAIN_ENTRY(stem) {"dflash_" #stem, sizeof(PlainParams_##stem)},
    DFLASH_GPU_PLAIN_KERNELS(DFLASH_GPU_PLAIN_ENTRY)
#define DFLASH_GPU_FORMAT_ENTRY(stem, enumerator, name) \
  {"dflash_" stem "_" #name, sizeof(ProjectionParams)},
#define DFLASH_GPU_WEIGHT_ENTRY(stem) DFLASH_GPU_FORMATS(DFLASH_GPU_FORMAT_ENTRY, #stem)
        DFLASH_GPU_WEIGHT_KERNELS(DFLASH_GPU_WEIGHT_ENTRY)
#define DFLASH_GPU_INTEGER_ENTRY(stem) DFLASH_GPU_INTEGER_FORMATS(DFLASH_GPU_FORMAT_ENTRY, #stem)
            DFLASH_GPU_INTEGER_KERNELS(DFLASH_GPU_INTEGER_ENTRY)};

}  // namespace

const char* kernel_name(KernelId kernel) { return kEntries[static_cast<uint16_t>(kernel)].name; }

uint32_t kernel_dynamic_bytes(KernelId kernel) {
  const KernelId first = kernel_id(WeightKernel::k_bf16_wgmma, WeightFormat{0});
  return kernel >= first &&
                 static_cast<uint16_t>(kernel) < static_cast<uint16_t>(first) + kNumWeightFormats
             ? kWgmmaSharedBytes
             : 0;
}

size_t kernel_params_bytes(KernelId kernel) {
  return kEntries[static_cast<uint16_t>(kernel)].params_bytes;
}

}  // namespace dflash::compute::gpu
