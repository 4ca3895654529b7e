// Both ends of a channel in one process, over the same ring as the shared transport but on private
// memory.
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
Result<ChannelPair> make_loopback(const SlotGeometry& geometry);

}  // namespace dflash::transport
