// The 64-byte header that precedes every message on a data channel, and its total decoder: any 64
// bytes give either a header whose every field is within its limit, or an error that names the
// field.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"
#include "base/result.h"

namespace dflash::wire {

inline constexpr size_t kFrameHeaderBytes = 64;
inline constexpr uint32_t kFrameMagic = 0x584d4644;  // "DFMX", little-endian
inline constexpr uint8_t kFrameVersion = 1;
inline constexpr uint32_t kErrorPrefixBytes = 4;  // ErrorCode and a zero, before an error's text

// The values are on the wire, so that new ones are only appended.
enum class FrameKind : uint8_t {
  kRequest = 1,  // payload: a ragged request (payload.h)
  kReply = 2,    // payload: ReplyTiming, then the rows
  kError = 3,    // payload: ErrorCode u16, zero u16, then UTF-8 text of at most kMaxErrorTextBytes
};

// Offsets in bytes and types stand beside the fields; all numbers are little-endian. The magic (u32
// at 0), the version (u8 at 4) and the header's checksum (u32 at 60, over bytes 0..59) are written
// and checked by the codec and have no field here.
struct FrameHeader {
  FrameKind kind = FrameKind::kRequest;  // 5 u8
  Dtype request_dtype = Dtype::kF32;     // 6 u8
  Dtype reply_dtype = Dtype::kF32;       // 7 u8
  uint64_t generation = 0;               // 8 u64 of the data path; every attach has another
  uint64_t call_id = 0;                  // 16 u64 never reused within a session
  uint64_t weights_fingerprint = 0;      // 24 u64 of the shard's weights, from `load`
  uint32_t layer = 0;                    // 32 u32 index in the agreed layer table
  uint32_t shard = 0;                    // 36 u32 shard id within the layer
  uint32_t num_rows = 0;                 // 40 u32 1..kMaxRows (0 in an error)
  uint32_t num_pairs = 0;                // 44 u32 num_rows..kMaxPairs (0 in an error)
  uint32_t payload_bytes = 0;            // 48 u32 <= kMaxPayloadBytes; bytes that follow the header
  uint32_t payload_checksum = 0;         // 52 u32 base/checksum.h over the payload
  uint16_t slice = 0;                    // 56 u16 index of the slice in its call
  uint16_t attempt = 0;                  // 58 u16 0 for the first try
};

// Any thread. Encoding does not check limits: the caller keeps them.
void encode_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);
// Errors: kProtocol naming the field, what was found and what is allowed.
Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes);

}  // namespace dflash::wire
