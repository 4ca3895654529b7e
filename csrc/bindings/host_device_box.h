// The host's device as Python holds it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "plugin/host_device.h"

namespace dflash::bindings {

// The box is shared by all objects that use the device; the last one closes it.
struct HostDeviceBox {
  std::shared_ptr<plugin::HostDevice> device;
};

}  // namespace dflash::bindings
