// The codec of the frame header. Its offsets are those of frame.h and docs/protocol.md.
// SPDX-License-Identifier: Apache-2.0
#include "wire/frame.h"

#include <algorithm>
#include <string>

#include "base/checksum.h"
#include "wire/limits.h"
#include "wire/little_endian.h"

namespace dflash::wire {
namespace {

constexpr size_t kChecksumOffset = 60;

Error refuse(const char* field, uint64_t found, const std::string& allowed) {
  return {ErrorCode::kProtocol, std::string("frame header: ") + field + " is " +
                                    std::to_string(found) + "; allowed: " + allowed};
}

Status require_range(const char* field, uint64_t found, uint64_t low, uint64_t high) {
  if (found >= low && found <= high) return ok();
  return refuse(field, found, std::to_string(low) + ".." + std::to_string(high));
}

Status check_preamble(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  const uint32_t magic = load_le<uint32_t>(bytes, 0);
  if (magic != kFrameMagic)
    return refuse("magic", magic, std::to_string(kFrameMagic) + " (\"DFMX\")");
  const uint8_t version = load_le<uint8_t>(bytes, 4);
  if (version != kFrameVersion) return refuse("version", version, std::to_string(kFrameVersion));
  const uint32_t found = load_le<uint32_t>(bytes, kChecksumOffset);
  const uint32_t computed = checksum(bytes.first<kChecksumOffset>());
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
  store_le<uint32_t>(kFrameMagic, out, 0);
  store_le<uint8_t>(kFrameVersion, out, 4);
  store_le<uint8_t>(static_cast<uint8_t>(header.kind), out, 5);
  store_le<uint8_t>(static_cast<uint8_t>(header.request_dtype), out, 6);
  store_le<uint8_t>(static_cast<uint8_t>(header.reply_dtype), out, 7);
  store_le<uint64_t>(header.generation, out, 8);
  store_le<uint64_t>(header.call_id, out, 16);
  store_le<uint64_t>(header.weights_fingerprint, out, 24);
  store_le<uint32_t>(header.layer, out, 32);
  store_le<uint32_t>(header.shard, out, 36);
  store_le<uint32_t>(header.num_rows, out, 40);
  store_le<uint32_t>(header.num_pairs, out, 44);
  store_le<uint32_t>(header.payload_bytes, out, 48);
  store_le<uint32_t>(header.payload_checksum, out, 52);
  store_le<uint16_t>(header.slice, out, 56);
  store_le<uint16_t>(header.attempt, out, 58);
  store_le<uint32_t>(checksum(out.first<kChecksumOffset>()), out, kChecksumOffset);
}

Result<FrameHeader> decode_frame_header(std::span<const std::byte, kFrameHeaderBytes> bytes) {
  DFLASH_TRY(check_preamble(bytes));
  const uint8_t kind = load_le<uint8_t>(bytes, 5);
  DFLASH_TRY(require_range("kind", kind, static_cast<uint8_t>(FrameKind::kRequest),
                           static_cast<uint8_t>(FrameKind::kError)));
  const uint8_t request_dtype = load_le<uint8_t>(bytes, 6);
  DFLASH_TRY(require_range("request_dtype", request_dtype, 0, kNumDtypes - 1));
  const uint8_t reply_dtype = load_le<uint8_t>(bytes, 7);
  DFLASH_TRY(require_range("reply_dtype", reply_dtype, 0, kNumDtypes - 1));
  FrameHeader header;
  header.kind = static_cast<FrameKind>(kind);
  header.request_dtype = static_cast<Dtype>(request_dtype);
  header.reply_dtype = static_cast<Dtype>(reply_dtype);
  header.generation = load_le<uint64_t>(bytes, 8);
  header.call_id = load_le<uint64_t>(bytes, 16);
  header.weights_fingerprint = load_le<uint64_t>(bytes, 24);
  header.layer = load_le<uint32_t>(bytes, 32);
  header.shard = load_le<uint32_t>(bytes, 36);
  header.num_rows = load_le<uint32_t>(bytes, 40);
  header.num_pairs = load_le<uint32_t>(bytes, 44);
  header.payload_bytes = load_le<uint32_t>(bytes, 48);
  header.payload_checksum = load_le<uint32_t>(bytes, 52);
  header.slice = load_le<uint16_t>(bytes, 56);
  header.attempt = load_le<uint16_t>(bytes, 58);
  DFLASH_TRY(require_range("layer", header.layer, 0, kMaxLayers - 1));
  DFLASH_TRY(check_counts(header));
  return header;
}

}  // namespace dflash::wire
