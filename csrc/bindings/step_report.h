// How a device step ended. DeviceStep hands it to Client.end_step and to whoever explains a
// failure.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "client/types.h"

namespace dflash::bindings {

struct StepReport {
  int32_t code = 0;  // ErrorCode of the first failure, or 0
  uint32_t layer = 0, detail = 0;
  std::string worker;  // where it failed; empty where it was at none
  std::string text;    // the worker's words if it refused
  client::StepResult result;
};

}  // namespace dflash::bindings
