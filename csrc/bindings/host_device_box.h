// The host's device as Python holds it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "plugin/host_device.h"

namespace dflash::bindings {

struct HostDeviceBox {
  std::shared_ptr<plugin::HostDevice> device;
};

}  // namespace dflash::bindings
