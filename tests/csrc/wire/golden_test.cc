// Frames as bytes on disk (tests/golden/frames), written once by a program that shares no code with
// this one. A difference here is a change of the wire format: it needs a new frame version, never
// new files.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "wire/frame.h"
#include "wire/payload.h"
#include "wire/ragged.h"

namespace dflash::wire {
namespace {

std::vector<std::byte> golden(const std::string& name) {
  const auto path =
      std::filesystem::path(__FILE__).parent_path() / "../../golden/frames" / (name + ".bin");
  std::ifstream file(path, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), "cannot open ", path.string());
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<std::byte> bytes(text.size());
  std::transform(text.begin(), text.end(), bytes.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  return bytes;
}

FrameHeader common_header(FrameKind kind) {
  FrameHeader header;
  header.kind = kind;
  header.request_dtype = Dtype::kBF16;
  header.reply_dtype = Dtype::kF32;
  header.generation = 0x0102030405060708ull;
  header.call_id = 42;
  header.weights_fingerprint = 0x1122334455667788ull;
  header.layer = 5;
  header.shard = 1;
  header.num_rows = kind == FrameKind::kError ? 0 : 3;
  header.num_pairs = kind == FrameKind::kError ? 0 : 5;
  header.slice = 2;
  header.attempt = 1;
  return header;
}

// The golden header is exactly what the encoder writes for `kind` and this payload, and decodes.
// Returns the payload.
std::span<const std::byte> check_header(const std::vector<std::byte>& frame, FrameKind kind) {
  REQUIRE(frame.size() > kFrameHeaderBytes);
  const std::span<const std::byte> payload = std::span(frame).subspan(kFrameHeaderBytes);
  FrameHeader header = common_header(kind);
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  header.payload_checksum = checksum(payload);
  std::vector<std::byte> encoded(kFrameHeaderBytes);
  encode_frame_header(header, std::span(encoded).first<kFrameHeaderBytes>());
  CHECK(std::equal(encoded.begin(), encoded.end(), frame.begin()));
  const auto decoded = decode_frame_header(std::span(frame).first<kFrameHeaderBytes>());
  REQUIRE(decoded.ok());
  CHECK(decoded.value().payload_checksum == checksum(payload));
  return payload;
}

float f32_at(std::span<const std::byte> bytes, size_t offset) {
  uint32_t bits = 0;
  for (size_t i = 0; i < 4; ++i) bits |= std::to_integer<uint32_t>(bytes[offset + i]) << (8 * i);
  return std::bit_cast<float>(bits);
}

TEST_CASE("the golden request has its header, index and rows where the layout says") {
  const auto frame = golden("request");
  const auto payload = check_header(frame, FrameKind::kRequest);
  const auto layout = RequestLayout::of(3, 5, 4, Dtype::kBF16);
  REQUIRE(layout.ok());
  CHECK(layout.value().rows_offset == 64);
  REQUIRE(layout.value().payload_bytes == payload.size());
  RaggedIndex index;
  REQUIRE(index.assign(layout.value(), 3, 5, 4, payload).ok());
  CHECK(std::vector<float>(index.weights().begin(), index.weights().end()) ==
        std::vector<float>{0.5f, 0.25f, 1, 0.125f, -0.75f});
  CHECK(std::vector<uint16_t>(index.row_counts().begin(), index.row_counts().end()) ==
        std::vector<uint16_t>{2, 1, 2});
  CHECK(std::vector<uint16_t>(index.local_expert_ids().begin(), index.local_expert_ids().end()) ==
        std::vector<uint16_t>{0, 3, 1, 2, 2});
  const float rows[12] = {1, 2, 3, 4, -1, -2, -3, -4, 0.5f, 0.25f, 0.125f, 0};
  for (size_t i = 0; i < 12; ++i) {
    const size_t at = 64 + 2 * i;
    const auto bits =
        std::to_integer<uint32_t>(payload[at]) | std::to_integer<uint32_t>(payload[at + 1]) << 8;
    CHECK(bf16_to_f32(static_cast<uint16_t>(bits)) == rows[i]);
  }
}

TEST_CASE("the golden reply has its header, timing and rows where the layout says") {
  const auto frame = golden("reply");
  const auto payload = check_header(frame, FrameKind::kReply);
  REQUIRE(ReplyLayout::of(3, 2, Dtype::kF32).value().payload_bytes == payload.size());
  const ReplyTiming timing = decode_reply_timing(payload.first<kReplyTimingBytes>());
  CHECK(timing.received_ns == 1'000'000'007);
  CHECK(timing.started_ns == 1'000'000'100);
  CHECK(timing.finished_ns == 1'000'002'000);
  std::vector<std::byte> encoded(kReplyTimingBytes);
  encode_reply_timing(timing, std::span(encoded).first<kReplyTimingBytes>());
  CHECK(std::equal(encoded.begin(), encoded.end(), payload.begin()));
  CHECK(f32_at(payload, kReplyTimingBytes) == 1.5f);
  CHECK(f32_at(payload, kReplyTimingBytes + 4) == -2.25f);
}

TEST_CASE("the golden error has its header, code and text") {
  const auto frame = golden("error");
  const auto payload = check_header(frame, FrameKind::kError);
  const auto error = decode_error(payload);
  REQUIRE(error.ok());
  CHECK(error.value().code == ErrorCode::kRange);
  CHECK(error.value().text == "layer 5, row 2, column 1: 70000 exceeds f16");
  std::vector<std::byte> encoded(kMaxErrorPayloadBytes);
  encoded.resize(encode_error({error.value().code, error.value().text},
                              std::span(encoded).first<kMaxErrorPayloadBytes>()));
  CHECK(std::equal(encoded.begin(), encoded.end(), payload.begin(), payload.end()));
}

}  // namespace
}  // namespace dflash::wire
