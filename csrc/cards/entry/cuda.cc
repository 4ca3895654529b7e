// libdflash_cuda.so: the kernels for NVIDIA's cards in one fatbin, and the driver API opened at run
// time.
// SPDX-License-Identifier: Apache-2.0
#include "cards/cuda/cuda_driver.h"
#include "cards/entry/embedded_image.h"
#include "cards/entry/module_plugin.h"

DFLASH_EMBED(dflash_kernels_cuda, DFLASH_CUDA_IMAGE)

namespace dflash::plugin {
namespace {

struct Cuda {
  static constexpr const char* kName = "cuda";
  static constexpr int32_t kDlpackType = DFLASH_DLPACK_CUDA;
  static Result<std::unique_ptr<compute::gpu::DriverApi>> open() {
    return compute::gpu::open_cuda_driver(
        {dflash_kernels_cuda, DFLASH_CUDA_MAJOR, DFLASH_CUDA_LEAST_ARCH, DFLASH_CUDA_HAS_SM90A});
  }
};

}  // namespace
}  // namespace dflash::plugin

DFLASH_PLUGIN_EXPORT const dflash_backend_table* dflash_backend() {
  return dflash::plugin::table_of<dflash::plugin::ModuleDriver<dflash::plugin::Cuda>>();
}
DFLASH_PLUGIN_EXPORT const dflash_host_table* dflash_host_device() {
  return dflash::plugin::host_table_of<dflash::plugin::ModuleDriver<dflash::plugin::Cuda>>();
}
