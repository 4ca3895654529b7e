// A Driver (device_table.h) over a vendor's driver library, for the plug-ins of real cards.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/exchange_kernels.h"
#include "cards/entry/gpu_plugin.h"
#include "cards/entry/host_table.h"
#include "cards/module/module_runtime.h"
#include "plugin/device_table.h"

namespace dflash::plugin {

// Vendor: `static constexpr const char* kName`, `static constexpr int32_t kDlpackType` and `static
// Result<std::unique_ptr<compute::gpu::DriverApi>> open()`.
template <class Vendor>
struct ModuleDriver {
  static constexpr const char* kName = Vendor::kName;

  static Result<std::vector<DeviceListing>> list() {
    auto driver = Vendor::open();
    if (!driver.ok()) return std::move(driver).error();
    auto devices = driver.value()->list();
    if (!devices.ok()) return std::move(devices).error();
    std::vector<DeviceListing> listed;
    for (const compute::gpu::DriverDevice& found : devices.value()) {
      listed.push_back({found.facts.name, kName, found.facts.architecture, found.facts.memory_bytes,
                        found.reason});
    }
    return listed;
  }

  static Result<std::unique_ptr<Device>> open(uint32_t device, const OpenOptions&) {
    auto runtime = open_runtime(device, compute::gpu::expert_kernels());
    if (!runtime.ok()) return std::move(runtime).error();
    return std::unique_ptr<Device>(
        std::make_unique<GpuPluginDevice>(std::move(runtime).value(), true));
  }

  static constexpr int32_t kDlpackType = Vendor::kDlpackType;
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open_for_host(uint32_t device,
                                                                            const OpenOptions&) {
    return open_runtime(device, device_exchange::kExchangeKernels);
  }

 private:
  // `kernels`: those of the plug-in's image that this device will launch.
  static Result<std::unique_ptr<compute::gpu::DeviceRuntime>> open_runtime(
      uint32_t device, compute::gpu::KernelTable kernels) {
    auto driver = Vendor::open();
    if (!driver.ok()) return std::move(driver).error();
    return compute::gpu::make_module_runtime(std::move(driver).value(), device, kernels);
  }
};

}  // namespace dflash::plugin
