// The codecs of the frame header and of the pulse. Their offsets are those of docs/protocol.md.
// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.h"

#include <algorithm>
#include <string>

#include "base/checksum.h"
#include "wire/limits.h"
#include "wire/little_endian.h"
#include "wire/payload_layout.h"

namespace dflash::wire {
namespace {

Error refuse(const char* field, uint64_t found, const std::string& allowed) {
  return {ErrorCode::kProtocol, std::string("frame header: ") + field + " is " +
                                    std::to_string(found) + "; allowed: " + allowed};
}

Status require_range(const char* field, uint64_t found, uint64_t low, uint64_t high) {
  if (found >= low && found <= high) return ok();
  return refuse(field, found, std::to_string(low) + ".." + std::to_string(high));
}

Status check_preamble(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  const uint32_t magic = load_le<uint32_t>(bytes, frame_offset::kMagic);
  if (magic != kFrameMagic)
    return refuse("magic", magic, std::to_string(kFrameMagic) + " (\"DFMX\")");
  const uint8_t version = load_le<uint8_t>(bytes, frame_offset::kVersion);
  if (version != kFrameVersion) return refuse("version", version, std::to_string(kFrameVersion));
  const uint32_t found = load_le<uint32_t>(bytes, frame_offset::kHeaderChecksum);
  const uint32_t computed = checksum(bytes.first<kCheckedHeaderBytes>());
  if (found != computed)
    return refuse("header_checksum", found, std::to_string(computed) + " for these 60 bytes");
  return ok();
}

// Checks the counts against their limits. Whether the payload has exactly the length that they need
// is checked by the layouts.
Status check_counts(const FrameHeader& header) {
  if (header.kind == FrameKind::kError) {
    DFLASH_TRY(require_range("num_rows", header.num_rows, 0, 0));
    DFLASH_TRY(require_range("num_pairs", header.num_pairs, 0, 0));
    return require_range("payload_bytes", header.payload_bytes, kErrorPrefixBytes,
                         kErrorPrefixBytes + kMaxErrorTextBytes);
  }
  DFLASH_TRY(require_range("num_rows", header.num_rows, 1, kMaxRows));
  const uint64_t most_pairs =
      std::min<uint64_t>(kMaxPairs, uint64_t{header.num_rows} * kMaxPairsPerRow);
  DFLASH_TRY(require_range("num_pairs", header.num_pairs, header.num_rows, most_pairs));
  return require_range("payload_bytes", header.payload_bytes, 0, kMaxPayloadBytes);
}

}  // namespace

void encode_frame_header(const FrameHeader& header, std::span<std::byte, kFrameHeaderBytes> out) {
  store_le<uint32_t>(kFrameMagic, out, frame_offset::kMagic);
  store_le<uint8_t>(kFrameVersion, out, frame_offset::kVersion);
  store_le<uint8_t>(static_cast<uint8_t>(header.kind), out, frame_offset::kKind);
  store_le<uint8_t>(static_cast<uint8_t>(header.request_dtype), out, frame_offset::kRequestDtype);
  store_le<uint8_t>(static_cast<uint8_t>(header.reply_dtype), out, frame_offset::kReplyDtype);
  store_le<uint64_t>(header.generation, out, frame_offset::kGeneration);
  store_le<uint64_t>(header.call_id, out, frame_offset::kCallId);
  store_le<uint64_t>(header.weights_fingerprint, out, frame_offset::kWeightsFingerprint);
  store_le<uint32_t>(header.layer, out, frame_offset::kLayer);
  store_le<uint32_t>(header.shard, out, frame_offset::kShard);
  store_le<uint32_t>(header.num_rows, out, frame_offset::kNumRows);
  store_le<uint32_t>(header.num_pairs, out, frame_offset::kNumPairs);
  store_le<uint32_t>(header.payload_bytes, out, frame_offset::kPayloadBytes);
  store_le<uint32_t>(header.payload_checksum, out, frame_offset::kPayloadChecksum);
  store_le<uint16_t>(header.slice, out, frame_offset::kSlice);
  store_le<uint16_t>(header.attempt, out, frame_offset::kAttempt);
  store_le<uint32_t>(checksum(out.first<kCheckedHeaderBytes>()), out,
                     frame_offset::kHeaderChecksum);
}

Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  DFLASH_TRY(check_preamble(bytes));
  const uint8_t kind = load_le<uint8_t>(bytes, frame_offset::kKind);
  DFLASH_TRY(require_range("kind", kind, static_cast<uint8_t>(FrameKind::kRequest),
                           static_cast<uint8_t>(FrameKind::kError)));
  const uint8_t request_dtype = load_le<uint8_t>(bytes, frame_offset::kRequestDtype);
  DFLASH_TRY(require_range("request_dtype", request_dtype, 0, kNumDtypes - 1));
  const uint8_t reply_dtype = load_le<uint8_t>(bytes, frame_offset::kReplyDtype);
  DFLASH_TRY(require_range("reply_dtype", reply_dtype, 0, kNumDtypes - 1));
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.request_dtype = static_cast<Dtype>(request_dtype);
  header.reply_dtype = static_cast<Dtype>(reply_dtype);
  header.generation = load_le<uint64_t>(bytes, frame_offset::kGeneration);
  header.call_id = load_le<uint64_t>(bytes, frame_offset::kCallId);
  header.weights_fingerprint = load_le<uint64_t>(bytes, frame_offset::kWeightsFingerprint);
  header.layer = load_le<uint32_t>(bytes, frame_offset::kLayer);
  header.shard = load_le<uint32_t>(bytes, frame_offset::kShard);
  header.num_rows = load_le<uint32_t>(bytes, frame_offset::kNumRows);
  header.num_pairs = load_le<uint32_t>(bytes, frame_offset::kNumPairs);
  header.payload_bytes = load_le<uint32_t>(bytes, frame_offset::kPayloadBytes);
  header.payload_checksum = load_le<uint32_t>(bytes, frame_offset::kPayloadChecksum);
  header.slice = load_le<uint16_t>(bytes, frame_offset::kSlice);
  header.attempt = load_le<uint16_t>(bytes, frame_offset::kAttempt);
  DFLASH_TRY(require_range("layer", header.layer, 0, kMaxLayers - 1));
  DFLASH_TRY(check_counts(header));
  return header;
}

void encode_pulse(uint64_t counter, std::span<std::byte, kPulseBytes> out) {
  store_le(kPulseMagic, out, 0);
  store_le(kPulseVersion, out, 4);
  store_le(counter, out, 8);
}

std::optional<uint64_t> decode_pulse(std::span<const std::byte, kPulseBytes> bytes) {
  if (load_le<uint32_t>(bytes, 0) != kPulseMagic || load_le<uint32_t>(bytes, 4) != kPulseVersion)
    return std::nullopt;
  return load_le<uint64_t>(bytes, 8);
}

}  // namespace dflash::wire
