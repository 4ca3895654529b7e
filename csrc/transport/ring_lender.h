// What a channel over a ring has beside the contract of channels: its ring may be lent to a device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/channel.h"

namespace dflash::transport {

// The memory under a ring (transport/ring/layout.h), for a device that publishes and takes messages
// by itself. Heads count in units of the head word, twice the number of messages.
struct RingView {
  std::byte* own = nullptr;
  std::byte* peer = nullptr;
  bool is_peer_writable = false;  // how it is mapped here, whoever writes it
  uint64_t own_bytes = 0, peer_bytes = 0;
  uint64_t own_slots = 0, own_stride = 0;  // offset of slot 0, and from one slot to the next
  uint64_t peer_slots = 0, peer_stride = 0;
  uint32_t entry_mask = 0;
  uint32_t head = 0, tail = 0;   // what was published, and what was consumed
  std::shared_ptr<void> memory;  // keeps both sides mapped
};

class RingLender {
 public:
  virtual ~RingLender() = default;
  virtual RingView ring() const = 0;
  // Whoever uses the ring must say how far it came before the channel is used again.
  virtual void set_ring(uint32_t head, uint32_t tail) = 0;
};

// Null for a channel without a ring.
inline RingLender* ring_lender(Channel* channel) { return dynamic_cast<RingLender*>(channel); }

}  // namespace dflash::transport
