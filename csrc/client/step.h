// The client's half of device steps: the data paths of all workers are in the hands of the host's
// device, which publishes requests and takes replies by itself. Whoever has the turn (turn.h) calls
// these.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "client/call.h"
#include "client/link.h"
#include "client/types.h"

namespace dflash::client {

// Checks that all workers, their paths and their transports allow a step. Errors: kUnsupported
// naming a worker whose transport has no ring, kWorkerLost, kInvalidArgument where something is
// under way.
Status check_paths_for_step(Links links);
// Hands all paths over. Each must be fresh or in use and owe nothing.
std::vector<LeasedPath> lease_paths(Links links, int64_t now);
// Takes the paths back, and counts what was answered on them.
void return_paths(Links links, const std::map<uint32_t, Layer>& layers, const StepResult& result);

}  // namespace dflash::client
