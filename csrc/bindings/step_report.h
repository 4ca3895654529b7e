// How a device step ended: what DeviceStep hands to Client.end_step and to whoever explains a
// failure.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "client/types.h"

namespace dflash::bindings {

struct StepReport {
  int32_t code = 0;  // ErrorCode of the first failure; 0: none
  uint32_t layer = 0, detail = 0;
  std::string worker;  // where it failed; empty: at none
  std::string text;    // the worker's words, where it refused
  client::StepResult result;
};

}  // namespace dflash::bindings
