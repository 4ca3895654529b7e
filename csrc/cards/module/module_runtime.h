// DeviceRuntime over a vendor's driver: kernels come from the image that the plug-in carries, found
// by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "cards/module/driver_api.h"

namespace dflash::compute::gpu {

// `kernels`: what is launched of the driver's image. Errors: kInvalidArgument for a device that
// does not exist; kUnsupported where no image fits the device or lacks a kernel; kWorkerFailed with
// the driver's text.
Result<std::unique_ptr<DeviceRuntime>> make_module_runtime(std::unique_ptr<DriverApi> driver,
                                                           uint32_t device,
                                                           KernelTable kernels = expert_kernels());

}  // namespace dflash::compute::gpu
