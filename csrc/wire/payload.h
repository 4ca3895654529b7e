// Request and reply payloads as the processor reads and writes them: their offsets (defined in
// payload_layout.h) with every limit checked, a reply's timing, and the payload of an error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/result.h"
#include "wire/frame.h"
#include "wire/payload_layout.h"

namespace dflash::wire {

struct RequestLayout : RequestOffsets {
  // Errors: kInvalidArgument when a count is over its limit or the payload over kMaxPayloadBytes.
  static Result<RequestLayout> of(uint32_t num_rows, uint32_t num_pairs, uint32_t row_width,
                                  Dtype dtype);
};

struct ReplyLayout : ReplyOffsets {
  // Errors: as for a request.
  static Result<ReplyLayout> of(uint32_t num_rows, uint32_t row_width, Dtype dtype);
};

// Worker-side times of one call, CLOCK_MONOTONIC of the worker's machine, nanoseconds. On the wire
// these are kReplyTimingBytes, zero padded.
struct ReplyTiming {
  int64_t received_ns = 0;  // request complete at the worker
  int64_t started_ns = 0;   // computation began
  int64_t finished_ns = 0;  // reply rows written
};
void encode_reply_timing(const ReplyTiming& timing, std::span<std::byte, kReplyTimingBytes> out);
ReplyTiming decode_reply_timing(std::span<const std::byte, kReplyTimingBytes> bytes);

// What a worker answered instead of rows.
struct RemoteError {
  ErrorCode code = ErrorCode::kWorkerFailed;
  std::string text;
};
// An error's payload: ErrorCode u16, zero u16, text. Text beyond kMaxErrorTextBytes is cut. Returns
// the bytes written.
size_t encode_error(const Error& error, std::span<std::byte, kMaxErrorPayloadBytes> out);
// The text comes from a peer and goes to terminals: a byte outside printable ASCII becomes "?".
// Errors: kProtocol when length, code or the zero field is out of range.
Result<RemoteError> decode_error(std::span<const std::byte> payload);

// What an ideal ragged call moves (rules: rows*H*(b_out+b_in) + pairs*6 + rows*2).
uint64_t floor_bytes(uint64_t num_rows, uint64_t num_pairs, uint64_t in_width, Dtype request_dtype,
                     uint64_t out_width, Dtype reply_dtype);

}  // namespace dflash::wire
