// The data paths of a client in the hands of a device step, and how that ended: what Client and
// DeviceStep exchange.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "client/expert_client.h"

namespace dflash::bindings {

struct StepLease {
  std::vector<client::StepLane> lanes;
  uint64_t first_call = 0;
  uint32_t num_calls = 0;
};

struct StepReport {
  int32_t code = 0;  // ErrorCode of the first failure; 0: none
  uint32_t layer = 0, detail = 0;
  std::string worker;  // where it failed; empty: at none
  std::string text;    // the worker's words, where it refused
  std::vector<std::pair<uint32_t, uint32_t>> heads;
  std::vector<client::StepMessage> messages;
};

}  // namespace dflash::bindings
