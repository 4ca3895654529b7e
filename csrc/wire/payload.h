// Where everything lies in the payloads of a request and a reply. Both sides compute the offsets
// with the structs below.
//
// A request's payload:
//   weights f32 [num_pairs] | row_counts u16 [num_rows] | local_expert_ids u16 [num_pairs]
//   | zeros up to a multiple of 64 | hidden rows [num_rows, row_width] in the request dtype
// Pairs are listed row by row. Within a row the experts ascend by local id, and duplicates keep
// their order in the top-k.
//
// A reply's payload:
//   ReplyTiming (32 bytes) | rows [num_rows, row_width] in the reply dtype
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
// these are kReplyTimingBytes.
struct ReplyTiming {
  int64_t received_ns = 0;  // the request was complete at the worker
  int64_t started_ns = 0;   // the computation began
  int64_t finished_ns = 0;  // the reply's rows were written
  // How much of the time between received_ns and started_ns other hosts' requests took: a duration.
  int64_t behind_ns = 0;
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
// Reads an error's payload. The text comes from a peer and goes to terminals, so every byte outside
// printable ASCII becomes "?". Errors: kProtocol where length, code or the zero is out of range.
Result<RemoteError> decode_error(std::span<const std::byte> payload);

// Bytes that an ideal ragged call moves in both directions, without header, timing and padding.
uint64_t floor_bytes(uint64_t num_rows, uint64_t num_pairs, uint64_t in_width, Dtype request_dtype,
                     uint64_t out_width, Dtype reply_dtype);

// Sums up everything by which two builds could read the same bytes differently. A program's library
// and its supervisor are compiled at different times, and compare it before anything else.
uint32_t layout_fingerprint();

}  // namespace dflash::wire
