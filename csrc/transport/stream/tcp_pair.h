// A TCP connection of this process with itself, for probes, floors and tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <utility>

#include "base/owned_fd.h"
#include "base/result.h"

namespace dflash::transport {

// Returns both ends of a connection over the loopback interface, as the control plane would have
// dialled it. Both block, and neither has an option set.
//
// Errors: kSystem, naming the step that failed.
Result<std::pair<OwnedFd, OwnedFd>> tcp_pair();

}  // namespace dflash::transport
