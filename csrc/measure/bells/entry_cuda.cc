// libdflash_cuda_measure.so: the kernel that measures a doorbell on NVIDIA's cards.
// SPDX-License-Identifier: Apache-2.0
#include "cards/cuda/cuda_driver.h"
#include "cards/entry/embedded_image.h"
#include "cards/entry/export.h"
#include "cards/module/module_runtime.h"
#include "measure/bells/bell_table.h"
#include "measure/bells/gpu_bells.h"

DFLASH_EMBED(dflash_bell_kernels_cuda, DFLASH_CUDA_IMAGE)

namespace dflash::measure {
namespace {

struct Cuda {
  static constexpr const char* kName = "cuda";
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open(uint32_t device) {
    auto driver = compute::gpu::open_cuda_driver({dflash_bell_kernels_cuda, DFLASH_CUDA_MAJOR,
                                                  DFLASH_CUDA_LEAST_ARCH, DFLASH_CUDA_HAS_SM90A});
    if (!driver.ok()) return std::move(driver).error();
    return compute::gpu::make_module_runtime(std::move(driver).value(), device, kBellKernels);
  }
};

}  // namespace
}  // namespace dflash::measure

DFLASH_PLUGIN_EXPORT const dflash_bells_table* dflash_bells() {
  return dflash::measure::bells_table_of<dflash::measure::Cuda>();
}
