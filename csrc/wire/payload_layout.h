// Where everything lies in a request and a reply payload. This is the one description of it, for
// the processor's code and for the kernels of a host's card (cards/device_exchange/), so it uses
// nothing that device code cannot have. payload.h has the same offsets with their limits checked.
//
// Request payload: weights f32 [num_pairs] | row_counts u16 [num_rows] | local_expert_ids u16
// [num_pairs] | zero pad to kRowAlignment | hidden rows [num_rows, row_width] in the request dtype.
// Pairs are listed row by row; within a row experts ascend by local id (duplicates in top-k order).
// Reply payload: ReplyTiming (kReplyTimingBytes) | rows [num_rows, row_width] in the reply dtype.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "wire/limits.h"

namespace dflash::wire {

inline constexpr uint64_t kRowAlignment = 64;  // of a request's rows, from the payload's start
inline constexpr uint64_t kReplyTimingBytes = 32;
inline constexpr uint32_t kErrorPrefixBytes = 4;  // ErrorCode and zero before an error's text
inline constexpr size_t kMaxErrorPayloadBytes = kErrorPrefixBytes + kMaxErrorTextBytes;

// Offsets are from the start of the payload, which is 64-byte aligned because the header is 64
// bytes.
struct RequestOffsets {
  uint64_t weights_offset = 0;
  uint64_t row_counts_offset = 0;
  uint64_t local_ids_offset = 0;
  uint64_t index_bytes = 0;  // the end of the ids; zeros from here to the rows
  uint64_t rows_offset = 0;
  uint64_t payload_bytes = 0;
};

// For counts within limits.h, whose products are far from wrapping 64 bits.
constexpr RequestOffsets request_offsets(uint32_t num_rows, uint32_t num_pairs, uint32_t row_width,
                                         Dtype dtype) {
  RequestOffsets at;
  at.row_counts_offset = uint64_t{num_pairs} * sizeof(float);
  at.local_ids_offset = at.row_counts_offset + uint64_t{num_rows} * sizeof(uint16_t);
  at.index_bytes = at.local_ids_offset + uint64_t{num_pairs} * sizeof(uint16_t);
  at.rows_offset = (at.index_bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
  at.payload_bytes = at.rows_offset + uint64_t{num_rows} * row_width * dtype_bytes(dtype);
  return at;
}

struct ReplyOffsets {
  uint64_t rows_offset = kReplyTimingBytes;
  uint64_t payload_bytes = 0;
};

// For counts within limits.h.
constexpr ReplyOffsets reply_offsets(uint32_t num_rows, uint32_t row_width, Dtype dtype) {
  ReplyOffsets at;
  at.payload_bytes = at.rows_offset + uint64_t{num_rows} * row_width * dtype_bytes(dtype);
  return at;
}

}  // namespace dflash::wire
