// The outgoing half of a stream channel: messages that were published and that the socket has not
// yet taken, oldest first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "transport/channel.h"
#include "transport/secure/stream_socket.h"

namespace dflash::transport {

inline constexpr size_t kStreamPrefixBytes = 16;  // slot u32, zero u32, bytes u64, little-endian

class SendQueue {
 public:
  // The queue is bounded by the credit rule, under which a slot is under way at most once.
  bool is_full(uint32_t num_slots) const { return num_queued_ >= num_slots; }
  bool is_empty() const { return num_queued_ == 0; }
  // `message` belongs to the caller and must stay unchanged until it has been sent.
  void push(uint32_t slot, std::span<const std::byte> message);
  // Sends until the queue is empty or the socket is full, without blocking. Returns the bytes that
  // the socket took. Errors: kWorkerLost.
  Result<size_t> flush(StreamSocket& socket);

 private:
  struct Message {
    std::array<std::byte, kStreamPrefixBytes> prefix;
    std::span<const std::byte> bytes;
  };
  Message& at(size_t index) { return messages_[(first_ + index) % messages_.size()]; }
  void consume(size_t num_bytes);

  std::array<Message, kMaxSlots> messages_;
  size_t first_ = 0;
  size_t num_queued_ = 0;
  size_t sent_of_first_ = 0;  // bytes of the oldest one's prefix and message that were taken
};

}  // namespace dflash::transport
