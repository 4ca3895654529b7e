// The single-producer, single-consumer ring under the loopback and the shared transport.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::transport {

struct RingEnds {
  Side side = Side::kHost;
  SlotGeometry geometry;  // checked by the caller
  const char* kind = "";
  std::byte* own = nullptr;         // this side's memory, laid out by SegmentLayout::of(side, ...)
  const std::byte* peer = nullptr;  // the other side's
  bool is_peer_writable = false;    // how that is mapped
  std::shared_ptr<void> memory;     // keeps both alive
  // eventfd this side sleeps on when armed for poll; none: it always sleeps on the futex
  OwnedFd own_bell;
  // eventfd to ring when the peer sleeps in poll; none: the peer never does
  OwnedFd peer_bell;
};

std::unique_ptr<Channel> make_ring_channel(RingEnds ends);

}  // namespace dflash::transport
