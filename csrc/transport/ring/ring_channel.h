// The ring with one producer and one consumer that the loopback and the shared transport stand on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::transport {

// What a ring channel is made of; it takes ownership of the bells and a share of the memory.
struct RingEnds {
  Side side = Side::kHost;
  SlotGeometry geometry;  // the caller has checked it
  const char* kind = "";
  std::byte* own = nullptr;         // this side's memory, laid out by SegmentLayout::of(side, ...)
  const std::byte* peer = nullptr;  // the other side's memory
  bool is_peer_writable = false;    // whether the other side's memory is mapped writable
  std::shared_ptr<void> memory;     // keeps both mappings alive
  // An eventfd on which this side sleeps when armed for poll; without one it always sleeps on the
  // futex.
  OwnedFd own_bell;
  // An eventfd to ring when the peer sleeps in poll; there is none if the peer never does.
  OwnedFd peer_bell;
};

std::unique_ptr<Channel> make_ring_channel(RingEnds ends);

}  // namespace dflash::transport
