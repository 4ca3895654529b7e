// The 64-byte header that precedes every message on a data channel, and its total decoder: any 64
// bytes give either a header whose every field is within its limit, or an error that names the
// field. Beside it the pulse, the one message that has no header.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/dtype.h"
#include "base/result.h"
#include "wire/frame_layout.h"

namespace dflash::wire {

// Where the fields lie is said in frame_layout.h. Magic, version and the header's checksum are
// written and checked by the codec and have no field here.
struct FrameHeader {
  FrameKind kind = FrameKind::kRequest;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
  uint64_t generation = 0;           // of the data path; every attach has another
  uint64_t call_id = 0;              // never reused within a session
  uint64_t weights_fingerprint = 0;  // of the shard's weights, from `load`
  uint32_t layer = 0;                // index in the agreed layer table
  uint32_t shard = 0;                // shard id within the layer
  uint32_t num_rows = 0;             // 1..kMaxRows (0 in an error)
  uint32_t num_pairs = 0;            // num_rows..kMaxPairs (0 in an error)
  uint32_t payload_bytes = 0;        // <= kMaxPayloadBytes; bytes that follow the header
  uint32_t payload_checksum = 0;     // base/checksum.h over the payload
  uint16_t slice = 0;                // index of the slice in its call
  uint16_t attempt = 0;              // 0 for the first try
};

// Any thread. Encoding does not check limits: the caller keeps them.
void encode_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out);
// Errors: kProtocol naming the field, what was found and what is allowed.
Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes);

// The pulse is what a worker sends on a connection of its own to prove that it makes progress. It
// is little-endian: magic u32, version u32, progress counter u64. The time between two pulses is
// part of the protocol, because the host's limits are multiples of it.
inline constexpr uint32_t kPulseMagic = 0x534c5550;  // "PULS"
inline constexpr uint32_t kPulseVersion = 1;
inline constexpr size_t kPulseBytes = 16;
inline constexpr int kPulsePeriodMs = 100;  // a tenth of the shortest stall limit that makes sense

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out);
// Returns the counter, or nothing where the bytes are no pulse of this version.
std::optional<uint64_t> decode_pulse(std::span<const std::byte, kPulseBytes> bytes);

}  // namespace dflash::wire
