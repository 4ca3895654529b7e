// Device steps, the client's half: the data paths of all workers in the hands of the host's device,
// which publishes requests and takes replies by itself. Whoever has the turn (turn.h) calls these.
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

using Links = std::span<const std::unique_ptr<Link>>;

// Whether all workers, their paths and their transports allow a step. Errors: kUnsupported naming a
// worker whose transport is no ring, kWorkerLost, kInvalidArgument where something is under way.
Status check_paths_for_step(Links links);
// Hands all paths over; each is fresh or in use and owes nothing.
std::vector<LeasedPath> lease_paths(Links links, int64_t now);
// Takes them back, and counts what was answered on them.
void return_paths(Links links, const std::map<uint32_t, Layer>& layers, const StepResult& result);

}  // namespace dflash::client
