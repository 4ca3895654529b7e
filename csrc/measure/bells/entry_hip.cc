// libdflash_hip_measure.so: the kernel that measures a doorbell on AMD's cards, one code object per
// architecture.
// SPDX-License-Identifier: Apache-2.0
#include "cards/entry/embedded_image.h"
#include "cards/entry/export.h"
#include "cards/hip/hip_driver.h"
#include "cards/module/module_runtime.h"
#include "measure/bells/bell_table.h"
#include "measure/bells/gpu_bells.h"

#define DFLASH_HIP_OBJECT(architecture, path) DFLASH_EMBED(dflash_bell_kernels_##architecture, path)
#include DFLASH_HIP_OBJECTS
#undef DFLASH_HIP_OBJECT

namespace dflash::measure {
namespace {

struct Hip {
  static constexpr const char* kName = "hip";
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open(uint32_t device) {
    auto driver = compute::gpu::open_hip_driver({
#define DFLASH_HIP_OBJECT(architecture, path) {#architecture, dflash_bell_kernels_##architecture},
#include DFLASH_HIP_OBJECTS
#undef DFLASH_HIP_OBJECT
    });
    if (!driver.ok()) return std::move(driver).error();
    return compute::gpu::make_module_runtime(std::move(driver).value(), device, kBellKernels);
  }
};

}  // namespace
}  // namespace dflash::measure

DFLASH_PLUGIN_EXPORT const dflash_bells_table* dflash_bells() {
  return dflash::measure::bells_table_of<dflash::measure::Hip>();
}
