// Sums up everything by which two builds could read the same bytes differently.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstddef>
#include <span>

#include "base/checksum.h"
#include "wire/frame_layout.h"
#include "wire/limits.h"
#include "wire/payload_layout.h"

namespace dflash::wire {

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
