// The outgoing half of a stream channel: messages published and not yet taken by the kernel, oldest
// first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "transport/channel.h"

namespace dflash::transport {

inline constexpr size_t kStreamPrefixBytes = 16;  // slot u32, zero u32, bytes u64, little-endian

class SendQueue {
 public:
  // Bounded by the credit rule: a slot is under way at most once.
  bool is_full(uint32_t num_slots) const { return num_queued_ >= num_slots; }
  bool is_empty() const { return num_queued_ == 0; }
  // `message` stays the caller's and unchanged until it is sent.
  void push(uint32_t slot, std::span<const std::byte> message);
  // Sends until the queue is empty or the socket is full. Returns the bytes taken. Errors:
  // kWorkerLost.
  Result<size_t> flush(int socket);

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
  size_t sent_of_first_ = 0;  // bytes of prefix and message of the oldest that the kernel has taken
};

}  // namespace dflash::transport
