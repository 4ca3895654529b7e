// Damage by kind. What is no frame (a test may send anything) gets a flipped bit.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/damage.h"

#include <algorithm>

#include "base/checksum.h"
#include "wire/frame.h"
#include "wire/little_endian.h"
#include "wire/payload.h"

namespace dflash::simulation {
namespace {

using Header = std::span<std::byte, wire::kFrameHeaderBytes>;

bool flip_bit(std::span<std::byte> message, Random& random) {
  const uint64_t bit = random.below(8 * message.size());
  message[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  return bit / 8 < wire::kFrameHeaderBytes;
}

void lie_about_times(std::span<std::byte> payload, Random& random) {
  wire::encode_reply_timing(
      {static_cast<int64_t>(random.next()), static_cast<int64_t>(random.next()),
       static_cast<int64_t>(random.next())},
      payload.first<wire::kReplyTimingBytes>());
}

}  // namespace

bool damage(std::span<std::byte> message, FaultKind kind, Random& random) {
  if (kind == FaultKind::kFlipBit || message.size() < wire::kFrameHeaderBytes)
    return flip_bit(message, random);
  const Header bytes = message.first<wire::kFrameHeaderBytes>();
  auto decoded = wire::decode_frame_header(bytes);
  if (!decoded.ok()) return flip_bit(message, random);
  wire::FrameHeader& header = decoded.value();
  bool must_be_refused = true;
  if (kind == FaultKind::kStaleGeneration) {
    --header.generation;
  } else if (kind == FaultKind::kOtherAttempt) {
    header.attempt = static_cast<uint16_t>(header.attempt + 1);
  } else if (kind == FaultKind::kLyingTimes && header.kind == wire::FrameKind::kReply) {
    const auto payload = message.subspan(wire::kFrameHeaderBytes);
    lie_about_times(payload, random);
    header.payload_checksum = checksum(payload);
    must_be_refused = false;
  } else {
    return flip_bit(message, random);
  }
  wire::encode_frame_header(header, bytes);
  return must_be_refused;
}

std::vector<std::byte> begun_stream_message(uint32_t slot, std::span<const std::byte> message,
                                            size_t num_bytes) {
  constexpr size_t kPrefixBytes = 16;  // slot u32, zero u32, bytes u64 (transport/stream/stream.h)
  std::vector<std::byte> begun(kPrefixBytes + num_bytes);
  wire::store_le<uint32_t>(slot, begun, 0);
  wire::store_le<uint64_t>(message.size(), begun, 8);
  std::ranges::copy(message.first(num_bytes), begun.begin() + kPrefixBytes);
  return begun;
}

}  // namespace dflash::simulation
