// The incoming half of a stream channel: it turns bytes from the socket into messages in slots.
// Small messages go through a staging buffer, so that prefix and payload come with one read; the
// rest of a large one is read straight into its slot. It knows no socket, so that both the channel
// and the fuzz target can feed it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/result.h"
#include "transport/channel.h"
#include "transport/stream/send_queue.h"

namespace dflash::transport {

class Assembler {
 public:
  // `slots` is [num_slots * slot_bytes]. It belongs to the caller and must outlive this object.
  Assembler(std::span<std::byte> slots, uint32_t num_slots, uint64_t slot_bytes)
      : slots_(slots), num_slots_(num_slots), slot_bytes_(slot_bytes) {}

  // The next complete message of what has been read so far. Errors: kProtocol on a prefix out of
  // range, and on every call after that.
  Result<std::optional<Arrival>> next();

  // Where the next read should put its bytes, in this order: first the rest of a slot, which may be
  // empty, then staging. Valid only when next() has just returned nothing.
  struct Room {
    std::span<std::byte> slot, staging;
  };
  Room room();
  // Says that `num_bytes` have been read into room().
  void filled(size_t num_bytes);

  bool is_mid_message() const { return in_message_ || staged_ != 0; }

 private:
  Status open_message();

  // Large enough to hold a row of 2048 f32 with its index, so that one read brings it, and small
  // enough that the copy out of it stays in the cache.
  static constexpr size_t kStagingBytes = 16 << 10;

  std::span<std::byte> slots_;
  uint32_t num_slots_;
  uint64_t slot_bytes_;
  alignas(64) std::array<std::byte, kStagingBytes> staging_;
  size_t staged_begin_ = 0;
  size_t staged_ = 0;
  bool in_message_ = false;
  uint32_t slot_ = 0;
  std::span<std::byte> destination_;  // where the whole message lies in its slot
  size_t received_ = 0;               // bytes of it that have come
  std::optional<Error> broken_;
};

}  // namespace dflash::transport
