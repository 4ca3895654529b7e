// Layouts, timing, error payload and the ragged index's validation.
// SPDX-License-Identifier: Apache-2.0
#include "wire/payload.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <string>
#include <vector>

#include "failed.h"
#include "wire/limits.h"
#include "wire/little_endian.h"
#include "wire/ragged.h"

namespace dflash::wire {
namespace {

TEST_CASE("the request layout is dense, 64-byte aligned at its rows, and ends with them") {
  const auto layout = RequestLayout::of(3, 7, 10, Dtype::kBF16);
  REQUIRE(layout.ok());
  CHECK(layout.value().weights_offset == 0);
  CHECK(layout.value().row_counts_offset == 28);
  CHECK(layout.value().local_ids_offset == 34);
  CHECK(layout.value().rows_offset == 64);
  CHECK(layout.value().payload_bytes == 64 + 3 * 10 * 2);
}

TEST_CASE("the layouts hold at their limits and refuse one beyond") {
  CHECK(RequestLayout::of(kMaxRows, kMaxPairs, 4096, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(kMaxRows, kMaxPairs, kMaxRowWidth, Dtype::kF32).ok());  // 1 GiB
  CHECK(!RequestLayout::of(0, 0, 8, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(kMaxRows + 1, kMaxRows + 1, 8, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(2, 1, 8, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(1, kMaxPairs + 1, 8, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(1, 1, 0, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(1, 1, kMaxRowWidth + 1, Dtype::kF32).ok());
  CHECK(!RequestLayout::of(~0u, ~0u, ~0u, Dtype::kF32).ok());
  CHECK(ReplyLayout::of(2, 8, Dtype::kF16).value().payload_bytes == 32 + 32);
  CHECK(!ReplyLayout::of(kMaxRows, kMaxRowWidth, Dtype::kF32).ok());
  CHECK(!ReplyLayout::of(0, 8, Dtype::kF32).ok());
  const auto refused = ReplyLayout::of(1, kMaxRowWidth + 1, Dtype::kF32);
  CHECK(refused == Failed(ErrorCode::kInvalidArgument, "row_width is 65537"));
}

TEST_CASE("floor bytes count rows both ways, six bytes a pair and two a row") {
  CHECK(floor_bytes(10, 25, 64, Dtype::kBF16, 32, Dtype::kF32) ==
        10 * (64 * 2 + 32 * 4) + 25 * 6 + 10 * 2);
}

TEST_CASE("reply timing survives the codec and leaves no byte unset") {
  std::array<std::byte, kReplyTimingBytes> bytes;
  bytes.fill(std::byte{0xff});
  encode_reply_timing({1, 1'000'000'007, 0x7fffffffffffffff, 0}, bytes);
  const ReplyTiming timing = decode_reply_timing(bytes);
  CHECK(timing.received_ns == 1);
  CHECK(timing.started_ns == 1'000'000'007);
  CHECK(timing.finished_ns == 0x7fffffffffffffff);
  for (size_t i = 24; i < bytes.size(); ++i) CHECK(bytes[i] == std::byte{0});
  encode_reply_timing({1, 2, 3, 0x1122334455667788}, bytes);
  CHECK(decode_reply_timing(bytes).behind_ns == 0x1122334455667788);
}

TEST_CASE("an error payload keeps its code and cuts and cleans its text") {
  std::array<std::byte, kMaxErrorPayloadBytes> bytes;
  const Error sent{ErrorCode::kRange, std::string("layer 3\x1b[2J") + std::string(2000, 'x')};
  const size_t num_bytes = encode_error(sent, bytes);
  CHECK(num_bytes == kMaxErrorPayloadBytes);
  const auto got = decode_error(bytes);
  REQUIRE(got.ok());
  CHECK(got.value().code == ErrorCode::kRange);
  CHECK(got.value().text == "layer 3?[2J" + std::string(kMaxErrorTextBytes - 11, 'x'));
}

TEST_CASE("an error payload that is short, long or of unknown code is refused") {
  std::array<std::byte, kMaxErrorPayloadBytes + 1> bytes{};
  store_le<uint16_t>(1, bytes, 0);
  CHECK(decode_error(std::span(bytes).first(4)).ok());
  CHECK(!decode_error(std::span(bytes).first(3)).ok());
  CHECK(!decode_error(bytes).ok());
  store_le<uint16_t>(0, bytes, 0);
  CHECK(!decode_error(std::span(bytes).first(4)).ok());
  store_le<uint16_t>(12, bytes, 0);
  CHECK(!decode_error(std::span(bytes).first(4)).ok());
  store_le<uint32_t>(0x10001, bytes, 0);
  CHECK(!decode_error(std::span(bytes).first(4)).ok());
}

// Three rows with 2, 1 and 3 pairs over five local experts.
struct Request {
  std::vector<float> weights{0.5f, 0.25f, 1.0f, 0.1f, 0.2f, 0.3f};
  std::vector<uint16_t> counts{2, 1, 3};
  std::vector<uint16_t> ids{1, 4, 0, 2, 2, 3};

  RequestLayout layout() const { return RequestLayout::of(3, 6, 4, Dtype::kF32).value(); }
  std::vector<std::byte> payload() const {
    std::vector<std::byte> bytes(layout().payload_bytes);
    for (size_t i = 0; i < 6; ++i)
      store_le<uint32_t>(std::bit_cast<uint32_t>(weights[i]), bytes, 4 * i);
    for (size_t i = 0; i < 3; ++i)
      store_le<uint16_t>(counts[i], bytes, layout().row_counts_offset + 2 * i);
    for (size_t i = 0; i < 6; ++i)
      store_le<uint16_t>(ids[i], bytes, layout().local_ids_offset + 2 * i);
    return bytes;
  }
};

TEST_CASE("a valid index is copied, duplicates included, and survives its source") {
  const Request request;
  auto payload = request.payload();
  RaggedIndex index;
  REQUIRE(index.assign(request.layout(), 3, 6, 5, payload).ok());
  std::fill(payload.begin(), payload.end(), std::byte{0xff});
  CHECK(std::vector<float>(index.weights().begin(), index.weights().end()) == request.weights);
  CHECK(std::vector<uint16_t>(index.row_counts().begin(), index.row_counts().end()) ==
        request.counts);
  CHECK(std::vector<uint16_t>(index.local_expert_ids().begin(), index.local_expert_ids().end()) ==
        request.ids);
}

TEST_CASE("an index that breaks a rule is refused by field and row and leaves nothing behind") {
  struct Case {
    const char* named;
    std::function<void(Request&)> spoil;
  };
  const Case cases[] = {
      {"row_counts[1] is 0",                                    [](Request& r) { r.counts = {2, 0, 4}; }  },
      {"row_counts[0] is 257",                                  [](Request& r) { r.counts = {257, 1, 1}; }},
      {"sum of row_counts is 5",                                [](Request& r) { r.counts = {2, 1, 2}; }  },
      {"sum of row_counts up to row 2 is 7",                    [](Request& r) { r.counts = {2, 1, 4}; }  },
      {"local_expert_ids[1] of row 0 is 5",                     [](Request& r) { r.ids[1] = 5; }          },
      {"local_expert_ids[4] of row 2 is 1; allowed: ascending", [](Request& r) { r.ids[4] = 1; }          },
  };
  for (const Case& spoiled : cases) {
    Request request;
    spoiled.spoil(request);
    RaggedIndex index;
    const Status verdict = index.assign(request.layout(), 3, 6, 5, request.payload());
    REQUIRE_MESSAGE(!verdict.ok(), spoiled.named);
    CHECK(verdict == Failed(ErrorCode::kProtocol, spoiled.named));
    CHECK(index.weights().empty());
    CHECK(index.row_counts().empty());
  }
}

TEST_CASE("a payload of another length than its counts demand is refused") {
  const Request request;
  auto payload = request.payload();
  RaggedIndex index;
  payload.pop_back();
  CHECK(!index.assign(request.layout(), 3, 6, 5, payload).ok());
  payload.resize(payload.size() + 2);
  CHECK(!index.assign(request.layout(), 3, 6, 5, payload).ok());
}

TEST_CASE("a smaller request after a larger one reuses the memory") {
  const Request request;
  RaggedIndex index;
  REQUIRE(index.assign(request.layout(), 3, 6, 5, request.payload()).ok());
  const float* const kept = index.weights().data();
  const auto layout = RequestLayout::of(1, 1, 4, Dtype::kF32).value();
  std::vector<std::byte> payload(layout.payload_bytes);
  store_le<uint16_t>(1, payload, layout.row_counts_offset);
  REQUIRE(index.assign(layout, 1, 1, 5, payload).ok());
  CHECK(index.weights().data() == kept);
}

}  // namespace
}  // namespace dflash::wire
