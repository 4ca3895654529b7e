// Payload layouts within their limits, the reply's timing block, the error payload, and the number
// that sums up all layouts.
// SPDX-License-Identifier: Apache-2.0
#include "wire/payload.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/checksum.h"
#include "wire/limits.h"
#include "wire/little_endian.h"

namespace dflash::wire {
namespace {

Status require_range(const char* what, uint64_t found, uint64_t low, uint64_t high) {
  if (found >= low && found <= high) return ok();
  return Error{ErrorCode::kInvalidArgument,
               std::string("payload layout: ") + what + " is " + std::to_string(found) +
                   "; allowed: " + std::to_string(low) + ".." + std::to_string(high)};
}

Status require_payload(uint64_t payload_bytes, uint32_t num_rows, uint32_t row_width, Dtype dtype) {
  if (payload_bytes <= kMaxPayloadBytes) return ok();
  return Error{ErrorCode::kInvalidArgument,
               "payload layout: " + std::to_string(num_rows) + " rows of " +
                   std::to_string(row_width) + " " + dtype_name(dtype) + " need " +
                   std::to_string(payload_bytes) + " bytes; allowed: at most " +
                   std::to_string(kMaxPayloadBytes) + "; send fewer rows in one message"};
}

bool is_error_code(uint16_t code) {
  return code >= static_cast<uint16_t>(ErrorCode::kInvalidArgument) &&
         code <= static_cast<uint16_t>(ErrorCode::kClosed);
}

}  // namespace

Result<RequestLayout> RequestLayout::of(uint32_t num_rows, uint32_t num_pairs, uint32_t row_width,
                                        Dtype dtype) {
  DFLASH_TRY(require_range("num_rows", num_rows, 1, kMaxRows));
  DFLASH_TRY(require_range("num_pairs", num_pairs, num_rows, kMaxPairs));
  DFLASH_TRY(require_range("row_width", row_width, 1, kMaxRowWidth));
  // The limits above keep every product below 2^31: 64 bits cannot wrap.
  const RequestLayout layout{request_offsets(num_rows, num_pairs, row_width, dtype)};
  DFLASH_TRY(require_payload(layout.payload_bytes, num_rows, row_width, dtype));
  return layout;
}

Result<ReplyLayout> ReplyLayout::of(uint32_t num_rows, uint32_t row_width, Dtype dtype) {
  DFLASH_TRY(require_range("num_rows", num_rows, 1, kMaxRows));
  DFLASH_TRY(require_range("row_width", row_width, 1, kMaxRowWidth));
  const ReplyLayout layout{reply_offsets(num_rows, row_width, dtype)};
  DFLASH_TRY(require_payload(layout.payload_bytes, num_rows, row_width, dtype));
  return layout;
}

void encode_reply_timing(const ReplyTiming& timing, std::span<std::byte, kReplyTimingBytes> out) {
  store_le<uint64_t>(static_cast<uint64_t>(timing.received_ns), out, 0);
  store_le<uint64_t>(static_cast<uint64_t>(timing.started_ns), out, 8);
  store_le<uint64_t>(static_cast<uint64_t>(timing.finished_ns), out, 16);
  store_le<uint64_t>(static_cast<uint64_t>(timing.behind_ns), out, 24);
}

ReplyTiming decode_reply_timing(std::span<const std::byte, kReplyTimingBytes> bytes) {
  ReplyTiming timing;
  timing.received_ns = static_cast<int64_t>(load_le<uint64_t>(bytes, 0));
  timing.started_ns = static_cast<int64_t>(load_le<uint64_t>(bytes, 8));
  timing.finished_ns = static_cast<int64_t>(load_le<uint64_t>(bytes, 16));
  timing.behind_ns = static_cast<int64_t>(load_le<uint64_t>(bytes, 24));
  return timing;
}

size_t encode_error(const Error& error, std::span<std::byte, kMaxErrorPayloadBytes> out) {
  store_le<uint16_t>(static_cast<uint16_t>(error.code), out, 0);
  store_le<uint16_t>(0, out, 2);
  const size_t text_bytes = std::min<size_t>(error.message.size(), kMaxErrorTextBytes);
  std::transform(error.message.begin(),
                 error.message.begin() + static_cast<std::ptrdiff_t>(text_bytes),
                 out.begin() + kErrorPrefixBytes, [](char c) { return static_cast<std::byte>(c); });
  return kErrorPrefixBytes + text_bytes;
}

Result<RemoteError> decode_error(std::span<const std::byte> payload) {
  if (payload.size() < kErrorPrefixBytes || payload.size() > kMaxErrorPayloadBytes) {
    return Error{ErrorCode::kProtocol, "error payload: length is " +
                                           std::to_string(payload.size()) +
                                           "; allowed: " + std::to_string(kErrorPrefixBytes) +
                                           ".." + std::to_string(kMaxErrorPayloadBytes)};
  }
  const uint16_t code = load_le<uint16_t>(payload, 0);
  if (!is_error_code(code)) {
    return Error{ErrorCode::kProtocol,
                 "error payload: code is " + std::to_string(code) + "; allowed: 1.." +
                     std::to_string(static_cast<uint16_t>(ErrorCode::kClosed))};
  }
  if (const uint16_t zero = load_le<uint16_t>(payload, 2); zero != 0) {
    return Error{ErrorCode::kProtocol,
                 "error payload: reserved field is " + std::to_string(zero) + "; allowed: 0"};
  }
  // The text ends up in terminals and logs, so nothing outside printable ASCII gets through.
  RemoteError error{static_cast<ErrorCode>(code), {}};
  for (const std::byte byte : payload.subspan(kErrorPrefixBytes)) {
    const char c = static_cast<char>(byte);
    error.text.push_back(c >= ' ' && c <= '~' ? c : '?');
  }
  return error;
}

uint64_t floor_bytes(uint64_t num_rows, uint64_t num_pairs, uint64_t in_width, Dtype request_dtype,
                     uint64_t out_width, Dtype reply_dtype) {
  constexpr uint64_t kPairBytes = sizeof(float) + sizeof(uint16_t);  // a weight and a local id
  return num_rows * (in_width * dtype_bytes(request_dtype) + out_width * dtype_bytes(reply_dtype)) +
         num_pairs * kPairBytes + num_rows * sizeof(uint16_t);
}

uint32_t layout_fingerprint() {
  // Offsets of a payload with odd counts stand for the order and the padding of its parts.
  const RequestOffsets request = request_offsets(3, 7, 5, Dtype::kBF16);
  const ReplyOffsets reply = reply_offsets(3, 5, Dtype::kF16);
  const std::array<uint64_t, 19> facts = {kFrameVersion,
                                          kFrameHeaderBytes,
                                          kMaxRows,
                                          kMaxPairsPerRow,
                                          kMaxPairs,
                                          kMaxExpertsPerShard,
                                          kMaxRowWidth,
                                          kMaxPayloadBytes,
                                          kMaxLayers,
                                          kMaxErrorTextBytes,
                                          frame_offset::kSlice,
                                          frame_offset::kHeaderChecksum,
                                          request.weights_offset,
                                          request.row_counts_offset,
                                          request.local_ids_offset,
                                          request.rows_offset,
                                          request.payload_bytes,
                                          reply.rows_offset,
                                          reply.payload_bytes};
  return checksum(std::as_bytes(std::span(facts)));
}

}  // namespace dflash::wire
