// Where everything lies in a request and a reply payload: one struct computes the offsets for both
// sides.
//
// Request payload: weights f32 [num_pairs] | row_counts u16 [num_rows] | local_expert_ids u16
// [num_pairs] | zero pad to 64 | hidden rows [num_rows, row_width] in the request dtype. Pairs are
// listed row by row; within a row experts ascend by local id (duplicates in top-k order). Reply
// payload: ReplyTiming (64 bytes) | rows [num_rows, row_width] in the reply dtype.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/result.h"
#include "wire/frame.h"
#include "wire/limits.h"

namespace dflash::wire {

// Offsets are from the start of the payload, which is 64-byte aligned because the header is 64
// bytes.
struct RequestLayout {
  uint64_t weights_offset = 0;
  uint64_t row_counts_offset = 0;
  uint64_t local_ids_offset = 0;
  uint64_t rows_offset = 0;
  uint64_t payload_bytes = 0;

  // Errors: kInvalidArgument when a count is over its limit or the payload over kMaxPayloadBytes
  // (128-bit arithmetic).
  static Result<RequestLayout> of(uint32_t num_rows, uint32_t num_pairs, uint32_t row_width,
                                  Dtype dtype);
};

// Worker-side times of one call, CLOCK_MONOTONIC of the worker's machine, nanoseconds. 64 bytes on
// the wire, zero padded.
struct ReplyTiming {
  int64_t received_ns = 0;  // request complete at the worker
  int64_t started_ns = 0;   // computation began
  int64_t finished_ns = 0;  // reply rows written
};
inline constexpr uint64_t kReplyTimingBytes = 64;
void encode_reply_timing(const ReplyTiming& timing, std::span<std::byte, kReplyTimingBytes> out);
ReplyTiming decode_reply_timing(std::span<const std::byte, kReplyTimingBytes> bytes);

struct ReplyLayout {
  uint64_t rows_offset = kReplyTimingBytes;
  uint64_t payload_bytes = 0;
  static Result<ReplyLayout> of(uint32_t num_rows, uint32_t row_width, Dtype dtype);
};

// What a worker answered instead of rows.
struct RemoteError {
  ErrorCode code = ErrorCode::kWorkerFailed;
  std::string text;
};
// An error's payload: ErrorCode u16, zero u16, text. Text beyond kMaxErrorTextBytes is cut. Returns
// the bytes written.
inline constexpr size_t kMaxErrorPayloadBytes = kErrorPrefixBytes + kMaxErrorTextBytes;
size_t encode_error(const Error& error, std::span<std::byte, kMaxErrorPayloadBytes> out);
// The text comes from a peer and goes to terminals: a byte outside printable ASCII becomes "?".
// Errors: kProtocol when length, code or the zero field is out of range.
Result<RemoteError> decode_error(std::span<const std::byte> payload);

// What an ideal ragged call moves (rules: rows*H*(b_out+b_in) + pairs*6 + rows*2).
uint64_t floor_bytes(uint64_t num_rows, uint64_t num_pairs, uint64_t in_width, Dtype request_dtype,
                     uint64_t out_width, Dtype reply_dtype);

}  // namespace dflash::wire
