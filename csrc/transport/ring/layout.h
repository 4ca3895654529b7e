// Where everything lies in memory that one side writes and the other only reads: a header line, the
// producer's line, the sleeping line, the table of entries, the slots. Every shared word has one
// writer and lies in that writer's memory. Lines are 128 bytes apart, because processors prefetch
// cache lines in pairs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "transport/channel.h"
#include "transport/ring/ring_words.h"

namespace dflash::transport {

inline constexpr uint32_t kSegmentMagic = 0x47534644;  // "DFSG", little-endian
inline constexpr uint32_t kSegmentVersion = 1;

// Whether the writer sleeps, and on what its peer can wake it: a futex on the head, or the bell.
enum class SleepState : uint32_t { kAwake = 0, kFutex = 1, kPoll = 2 };

// The offsets of one side's memory, in bytes.
struct SegmentLayout {
  uint64_t slot_bytes = 0;  // what a slot of this writer holds
  uint64_t slot_stride = 0;
  uint64_t slots_offset = 0;
  uint64_t total_bytes = 0;  // a whole number of pages
  uint32_t entry_mask = 0;

  // Errors: kInvalidArgument where the geometry is out of its limits.
  static Result<SegmentLayout> of(Side writer, const SlotGeometry& geometry);
};

// Errors: kInvalidArgument naming the field that is out of its limits.
Status check_geometry(const SlotGeometry& geometry);

// Writes the header line, once, before the peer sees the memory.
void write_segment_header(std::byte* base, Side writer, const SlotGeometry& geometry,
                          uint64_t generation);
// Copies the peer's header line and compares the copy with what was agreed. Errors: kProtocol
// naming the field that differs.
Status check_segment_header(const std::byte* base, Side writer, const SlotGeometry& geometry,
                            uint64_t generation);

}  // namespace dflash::transport
