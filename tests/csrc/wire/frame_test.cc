// The header codec: what is encoded decodes, and every field out of its limit is refused by name.
// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.h"

#include <doctest/doctest.h>

#include <array>
#include <functional>
#include <random>
#include <string>

#include "base/checksum.h"
#include "failed.h"
#include "wire/limits.h"
#include "wire/little_endian.h"
#include "wire/payload_layout.h"

namespace dflash::wire {
namespace {

using HeaderBytes = std::array<std::byte, kFrameHeaderBytes>;

FrameHeader some_header() {
  FrameHeader header;
  header.request_dtype = Dtype::kBF16;
  header.reply_dtype = Dtype::kF16;
  header.generation = 0x0123456789abcdefull;
  header.call_id = 42;
  header.weights_fingerprint = 0xfedcba9876543210ull;
  header.layer = 7;
  header.shard = 3;
  header.num_rows = 10;
  header.num_pairs = 25;
  header.payload_bytes = 4096;
  header.payload_checksum = 0xdeadbeef;
  header.slice = 2;
  header.attempt = 1;
  return header;
}

HeaderBytes encode(const FrameHeader& header) {
  HeaderBytes bytes;
  encode_frame_header(header, bytes);
  return bytes;
}

// Recomputes the header checksum after a test changed a field, so that the field's own check is
// what refuses.
void reseal(HeaderBytes& bytes) {
  store_le<uint32_t>(checksum(std::span(bytes).first(60)), bytes, 60);
}

TEST_CASE("every field of a header survives the codec") {
  const FrameHeader sent = some_header();
  const auto got = decode_frame_header(encode(sent));
  REQUIRE(got.ok());
  const FrameHeader& header = got.value();
  CHECK(header.kind == sent.kind);
  CHECK(header.request_dtype == sent.request_dtype);
  CHECK(header.reply_dtype == sent.reply_dtype);
  CHECK(header.generation == sent.generation);
  CHECK(header.call_id == sent.call_id);
  CHECK(header.weights_fingerprint == sent.weights_fingerprint);
  CHECK(header.layer == sent.layer);
  CHECK(header.shard == sent.shard);
  CHECK(header.num_rows == sent.num_rows);
  CHECK(header.num_pairs == sent.num_pairs);
  CHECK(header.payload_bytes == sent.payload_bytes);
  CHECK(header.payload_checksum == sent.payload_checksum);
  CHECK(header.slice == sent.slice);
  CHECK(header.attempt == sent.attempt);
}

TEST_CASE("a field out of its limit is refused by name") {
  struct Case {
    const char* field;
    std::function<void(HeaderBytes&)> spoil;
  };
  const Case cases[] = {
      {"magic",         [](HeaderBytes& b) { store_le<uint32_t>(0, b, 0); }                        },
      {"version",       [](HeaderBytes& b) { store_le<uint8_t>(2, b, 4); }                         },
      {"kind",          [](HeaderBytes& b) { store_le<uint8_t>(0, b, 5); }                         },
      {"kind",          [](HeaderBytes& b) { store_le<uint8_t>(4, b, 5); }                         },
      {"request_dtype", [](HeaderBytes& b) { store_le<uint8_t>(kNumDtypes, b, 6); }                },
      {"reply_dtype",   [](HeaderBytes& b) { store_le<uint8_t>(kNumDtypes, b, 7); }                },
      {"layer",         [](HeaderBytes& b) { store_le<uint32_t>(kMaxLayers, b, 32); }              },
      {"num_rows",      [](HeaderBytes& b) { store_le<uint32_t>(0, b, 40); }                       },
      {"num_rows",      [](HeaderBytes& b) { store_le<uint32_t>(kMaxRows + 1, b, 40); }            },
      {"num_pairs",     [](HeaderBytes& b) { store_le<uint32_t>(9, b, 44); }                       },
      {"num_pairs",     [](HeaderBytes& b) { store_le<uint32_t>(10 * kMaxPairsPerRow + 1, b, 44); }},
      {"payload_bytes", [](HeaderBytes& b) { store_le<uint32_t>(kMaxPayloadBytes + 1, b, 48); }    },
      // an error frame has no rows
      {"num_rows",      [](HeaderBytes& b) { store_le<uint8_t>(3, b, 5); }                         },
  };
  for (const Case& spoiled : cases) {
    HeaderBytes bytes = encode(some_header());
    spoiled.spoil(bytes);
    reseal(bytes);
    const auto got = decode_frame_header(bytes);
    REQUIRE_MESSAGE(!got.ok(), spoiled.field);
    CHECK(got.error().code == ErrorCode::kProtocol);
    CHECK_MESSAGE(
        got.error().message.find(std::string(spoiled.field) + " is ") != std::string::npos,
        got.error().message);
    CHECK(got.error().message == Has{"allowed: "});
  }
}

TEST_CASE("an error frame carries no rows and at most its text") {
  FrameHeader header = some_header();
  header.kind = FrameKind::kError;
  header.num_rows = header.num_pairs = 0;
  header.payload_bytes = kErrorPrefixBytes;
  CHECK(decode_frame_header(encode(header)).ok());
  header.payload_bytes = kErrorPrefixBytes + kMaxErrorTextBytes;
  CHECK(decode_frame_header(encode(header)).ok());
  header.payload_bytes += 1;
  CHECK(!decode_frame_header(encode(header)).ok());
  header.payload_bytes = kErrorPrefixBytes - 1;
  CHECK(!decode_frame_header(encode(header)).ok());
}

TEST_CASE("every single flipped bit of a header is refused") {
  const HeaderBytes intact = encode(some_header());
  for (size_t bit = 0; bit < 8 * kFrameHeaderBytes; ++bit) {
    HeaderBytes bytes = intact;
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    CHECK_MESSAGE(!decode_frame_header(bytes).ok(), "bit ", bit);
  }
}

TEST_CASE("random bytes decode to an error or to fields within their limits") {
  std::mt19937 random(1);
  for (int round = 0; round < 20'000; ++round) {
    HeaderBytes bytes = encode(some_header());
    for (int i = 0; i < 4; ++i) bytes[4 + random() % 56] = static_cast<std::byte>(random());
    reseal(bytes);
    const auto got = decode_frame_header(bytes);
    if (!got.ok()) continue;
    CHECK(got.value().num_rows <= kMaxRows);
    CHECK(got.value().num_pairs <= kMaxPairs);
    CHECK(got.value().payload_bytes <= kMaxPayloadBytes);
    CHECK(encode(got.value()) == bytes);
  }
}

}  // namespace
}  // namespace dflash::wire
