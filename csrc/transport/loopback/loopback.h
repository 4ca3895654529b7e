// Both ends of a channel in one process: the ring of the shared transport on private memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <utility>

#include "transport/channel.h"

namespace dflash::transport {

struct ChannelPair {
  std::unique_ptr<Channel> host;
  std::unique_ptr<Channel> worker;
};
// The ends may live on two threads. Errors: kInvalidArgument, kOutOfMemory, kSystem.
Result<ChannelPair> make_loopback(const SlotGeometry& geometry);

}  // namespace dflash::transport
