// libdflash_hip.so: the kernels for AMD's cards, one code object per architecture, and the HIP
// runtime opened at run time. The list of architectures is what the compiler of this build knew
// (csrc/cards/plugins.cmake).
// SPDX-License-Identifier: Apache-2.0
#include "cards/entry/embedded_image.h"
#include "cards/entry/module_plugin.h"
#include "cards/hip/hip_driver.h"

#define DFLASH_HIP_OBJECT(architecture, path) DFLASH_EMBED(dflash_kernels_##architecture, path)
#include DFLASH_HIP_OBJECTS
#undef DFLASH_HIP_OBJECT

namespace dflash::plugin {
namespace {

struct Hip {
  static constexpr const char* kName = "hip";
  static constexpr int32_t kDlpackType = DFLASH_DLPACK_ROCM;
  static Result<std::unique_ptr<compute::gpu::DriverApi>> open() {
    return compute::gpu::open_hip_driver({
#define DFLASH_HIP_OBJECT(architecture, path) {#architecture, dflash_kernels_##architecture},
#include DFLASH_HIP_OBJECTS
#undef DFLASH_HIP_OBJECT
    });
  }
};

}  // namespace
}  // namespace dflash::plugin

DFLASH_PLUGIN_EXPORT const dflash_backend_table* dflash_backend() {
  return dflash::plugin::table_of<dflash::plugin::ModuleDriver<dflash::plugin::Hip>>();
}
DFLASH_PLUGIN_EXPORT const dflash_host_table* dflash_host_device() {
  return dflash::plugin::host_table_of<dflash::plugin::ModuleDriver<dflash::plugin::Hip>>();
}
