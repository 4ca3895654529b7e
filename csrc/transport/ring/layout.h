// Where everything lies in the memory one side writes and the other only reads: header line,
// producer line, sleeping line, entry table, slots. Every shared word has one writer and lies in
// that writer's memory. The words themselves are in ring_words.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "transport/channel.h"
#include "transport/ring/ring_words.h"

namespace dflash::transport {

inline constexpr uint32_t kSegmentMagic = 0x47534644;  // "DFSG", little-endian
inline constexpr uint32_t kSegmentVersion = 1;

enum class SleepState : uint32_t { kAwake = 0, kFutex = 1, kPoll = 2 };

struct SegmentLayout {
  uint64_t slot_bytes = 0;  // capacity of a slot of this writer
  uint64_t slot_stride = 0;
  uint64_t slots_offset = 0;
  uint64_t total_bytes = 0;  // whole pages
  uint32_t entry_mask = 0;

  // Errors: kInvalidArgument when the geometry is out of its limits.
  static Result<SegmentLayout> of(Side writer, const SlotGeometry& geometry);
};

Status check_geometry(const SlotGeometry& geometry);

// The header line, written once before the peer sees the memory.
void write_segment_header(std::byte* base, Side writer, const SlotGeometry& geometry,
                          uint64_t generation);
// Copies the peer's header line and compares the copy with what was agreed. Errors: kProtocol
// naming the field.
Status check_segment_header(const std::byte* base, Side writer, const SlotGeometry& geometry,
                            uint64_t generation);

}  // namespace dflash::transport
