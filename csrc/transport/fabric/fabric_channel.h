// The channel of an open endpoint (fabric.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/result.h"
#include "transport/channel.h"
#include "transport/fabric/endpoint.h"
#include "transport/secure/stream_socket.h"

namespace dflash::transport {

// The bytes of the longest message that an endpoint of either side takes, and how many of each kind
// are under way at most: a slot each, and one more receive, so that a peer which sends without
// being answered is still heard.
uint64_t max_fabric_message(const SlotGeometry& geometry);
inline size_t num_fabric_sends(const SlotGeometry& geometry) { return geometry.num_slots; }
inline size_t num_fabric_receives(const SlotGeometry& geometry) { return geometry.num_slots + 1; }

// Makes the channel of an endpoint that has met its peer. `companion` is the connection to the same
// peer whose end ends the channel. Errors: kInvalidArgument for geometry, kOutOfMemory, kSystem.
Result<std::unique_ptr<Channel>> make_fabric_channel(Side side, const SlotGeometry& geometry,
                                                     FabricEndpoint endpoint,
                                                     StreamSocket companion);

}  // namespace dflash::transport
