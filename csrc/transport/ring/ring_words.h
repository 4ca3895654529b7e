// The words of a ring: where they lie in the memory that one side writes and the other only reads,
// and what their bits say. This is the one description of them, for the processor's channel and for
// the kernels of a host's card (cards/device_exchange/), so it uses nothing that device code cannot
// have.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace dflash::transport {

// Lines are 128 bytes apart because processors prefetch lines in pairs.
inline constexpr uint64_t kLineBytes = 128;
// u32: kOneMessage times the number of messages published, modulo 2^32, plus kClosedBit once closed
inline constexpr uint64_t kHeadOffset = 1 * kLineBytes;
// u32: SleepState of this memory's writer
inline constexpr uint64_t kSleepingOffset = 2 * kLineBytes;
// entries, indexed by message number modulo their power-of-two count
inline constexpr uint64_t kEntriesOffset = 3 * kLineBytes;
inline constexpr uint64_t kEntryBytes = 16;

// The low bit of the head says that the writer closed, so that a close changes the word that the
// peer sleeps on.
inline constexpr uint32_t kClosedBit = 1;
inline constexpr uint32_t kOneMessage = 2;

// Inside an entry; the u32 between both is zero.
inline constexpr uint64_t kEntrySlotOffset = 0;    // u32: the slot that holds the message
inline constexpr uint64_t kEntryLengthOffset = 8;  // u64: the message's bytes

}  // namespace dflash::transport
