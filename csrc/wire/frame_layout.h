// The bytes of a frame header: its constants and where each field lies. This is the one description
// of them; the codec (frame.cc) and the kernels of a host's card (cards/device_exchange/) both read
// it, so it uses nothing that device code cannot have.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::wire {

inline constexpr size_t kFrameHeaderBytes = 64;
inline constexpr uint32_t kFrameMagic = 0x584d4644;  // "DFMX", little-endian
inline constexpr uint8_t kFrameVersion = 1;

// Values are on the wire: append only.
enum class FrameKind : uint8_t {
  kRequest = 1,  // payload: ragged request (payload_layout.h)
  kReply = 2,    // payload: ReplyTiming, then rows
  kError = 3,    // payload: ErrorCode u16, zero u16, then UTF-8 text of at most kMaxErrorTextBytes
};

// Byte offset of each field; the type beside it is what lies there, little-endian and at a multiple
// of its own size. What the fields mean is said at FrameHeader (frame.h).
namespace frame_offset {
inline constexpr uint32_t kMagic = 0;                // u32
inline constexpr uint32_t kVersion = 4;              // u8
inline constexpr uint32_t kKind = 5;                 // u8
inline constexpr uint32_t kRequestDtype = 6;         // u8
inline constexpr uint32_t kReplyDtype = 7;           // u8
inline constexpr uint32_t kGeneration = 8;           // u64
inline constexpr uint32_t kCallId = 16;              // u64
inline constexpr uint32_t kWeightsFingerprint = 24;  // u64
inline constexpr uint32_t kLayer = 32;               // u32
inline constexpr uint32_t kShard = 36;               // u32
inline constexpr uint32_t kNumRows = 40;             // u32
inline constexpr uint32_t kNumPairs = 44;            // u32
inline constexpr uint32_t kPayloadBytes = 48;        // u32
inline constexpr uint32_t kPayloadChecksum = 52;     // u32
inline constexpr uint32_t kSlice = 56;               // u16
inline constexpr uint32_t kAttempt = 58;             // u16
inline constexpr uint32_t kHeaderChecksum = 60;      // u32
}  // namespace frame_offset

// The header's checksum is its last field, over everything before it.
inline constexpr size_t kCheckedHeaderBytes = kFrameHeaderBytes - 4;
static_assert(kCheckedHeaderBytes == frame_offset::kHeaderChecksum);

}  // namespace dflash::wire
