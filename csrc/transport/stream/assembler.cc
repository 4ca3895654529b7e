// Parses prefixes and fills slots.
// SPDX-License-Identifier: Apache-2.0
#include "transport/stream/assembler.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace dflash::transport {
namespace {

uint64_t load_le(std::span<const std::byte> bytes, size_t offset, size_t num_bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < num_bytes; ++i)
    value |= std::to_integer<uint64_t>(bytes[offset + i]) << (8 * i);
  return value;
}

Error refuse(const char* field, uint64_t found, uint64_t most) {
  return {ErrorCode::kProtocol, std::string("stream channel: the prefix's ") + field + " is " +
                                    std::to_string(found) + "; allowed: at most " +
                                    std::to_string(most)};
}

}  // namespace

Status Assembler::open_message() {
  const std::span<const std::byte> prefix =
      std::span(staging_).subspan(staged_begin_, kStreamPrefixBytes);
  const uint64_t slot = load_le(prefix, 0, 4);
  const uint64_t zero = load_le(prefix, 4, 4);
  const uint64_t bytes = load_le(prefix, 8, 8);
  if (slot >= num_slots_) return refuse("slot", slot, num_slots_ - 1);
  if (zero != 0) return refuse("reserved field", zero, 0);
  if (bytes > slot_bytes_) return refuse("length", bytes, slot_bytes_);
  staged_begin_ += kStreamPrefixBytes;
  staged_ -= kStreamPrefixBytes;
  slot_ = static_cast<uint32_t>(slot);
  destination_ = slots_.subspan(slot * slot_bytes_, bytes);
  received_ = 0;
  in_message_ = true;
  return ok();
}

Result<std::optional<Arrival>> Assembler::next() {
  if (broken_) return *broken_;
  if (!in_message_) {
    if (staged_ < kStreamPrefixBytes) return std::optional<Arrival>();
    if (auto opened = open_message(); !opened.ok()) {
      broken_ = std::move(opened).error();
      return *broken_;
    }
  }
  const size_t staged = std::min(staged_, destination_.size() - received_);
  if (staged > 0) {
    std::memcpy(destination_.data() + received_, staging_.data() + staged_begin_, staged);
    staged_begin_ += staged;
    staged_ -= staged;
    received_ += staged;
  }
  if (received_ < destination_.size()) return std::optional<Arrival>();
  in_message_ = false;
  return std::optional<Arrival>(Arrival{slot_, destination_});
}

Assembler::Room Assembler::room() {
  // Between messages less than a prefix is left, and inside one nothing at all, so that moving it
  // to the front costs little.
  if (staged_ > 0 && staged_begin_ > 0)
    std::memmove(staging_.data(), staging_.data() + staged_begin_, staged_);
  staged_begin_ = 0;
  return {in_message_ ? destination_.subspan(received_) : std::span<std::byte>(),
          std::span(staging_).subspan(staged_)};
}

void Assembler::filled(size_t num_bytes) {
  const size_t into_slot = in_message_ ? std::min(num_bytes, destination_.size() - received_) : 0;
  received_ += into_slot;
  staged_ += num_bytes - into_slot;
}

}  // namespace dflash::transport
