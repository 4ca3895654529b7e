// Any 64 bytes decode to a header within its limits, which encodes to the same 64 bytes, or to an
// error with a text. Each input is tried twice: as it is, and with magic, version and checksum made
// right, so that the fields behind them are reached.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "base/checksum.h"
#include "wire/frame.h"
#include "wire/limits.h"

namespace {

using namespace dflash;
using HeaderBytes = std::array<std::byte, wire::kFrameHeaderBytes>;

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

void examine(const HeaderBytes& bytes) {
  const auto header =
      wire::decode_frame_header(std::span<const std::byte, wire::kFrameHeaderBytes>(bytes));
  if (!header.ok()) {
    require(header.error().code == ErrorCode::kProtocol && !header.error().message.empty());
    return;
  }
  const wire::FrameHeader& fields = header.value();
  require(fields.num_rows <= wire::kMaxRows && fields.num_pairs <= wire::kMaxPairs);
  require(fields.payload_bytes <= wire::kMaxPayloadBytes && fields.layer < wire::kMaxLayers);
  require((fields.kind == wire::FrameKind::kError) == (fields.num_rows == 0));
  HeaderBytes again{};
  wire::encode_frame_header(fields, std::span<std::byte, wire::kFrameHeaderBytes>(again));
  require(again == bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  if (num_bytes < wire::kFrameHeaderBytes) return 0;
  HeaderBytes bytes{};
  std::memcpy(bytes.data(), data, bytes.size());
  examine(bytes);
  for (size_t i = 0; i < 4; ++i) bytes[i] = static_cast<std::byte>(wire::kFrameMagic >> (8 * i));
  bytes[4] = std::byte{wire::kFrameVersion};
  const uint32_t sum = checksum(std::span<const std::byte>(bytes).first(60));
  for (size_t i = 0; i < 4; ++i) bytes[60 + i] = static_cast<std::byte>(sum >> (8 * i));
  examine(bytes);
  return 0;
}
