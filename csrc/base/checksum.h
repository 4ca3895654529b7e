// The payload checksum: four interleaved CRC-32C lanes, which hide the latency of the crc32
// instruction.
//
// Definition (normative in docs/protocol.md). The bytes are split into 8-byte little-endian words.
// Word i feeds lane i % 4, which is a CRC-32C with the initial value ~0 and no final inversion; the
// tail of n % 8 bytes feeds lane (n / 8) % 4 byte by byte. Each lane is multiplied modulo 2^32 by
// an odd factor of its own, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D and 0x27D4EB2F for lanes 0 to 3. The
// result is the CRC-32C (initially ~0, finally inverted) over the four products as little-endian
// u32 and then the total byte count as little-endian u64.
//
// A CRC of CRCs alone is linear: certain pairs of flips in two lanes would cancel in any data. The
// factors break that, and they are odd so that no change of a lane is lost.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dflash {

// A checksum that is fed piece by piece. Not thread-safe.
class Checksum {
 public:
  // Feeds bytes. Every piece but the last must have a multiple of 32 bytes, so that the lanes stay
  // aligned.
  void update(std::span<const std::byte> bytes);
  uint32_t finish() const;

 private:
  uint32_t lanes_[4] = {~0u, ~0u, ~0u, ~0u};
  uint64_t total_bytes_ = 0;
};

// The checksum of one piece.
uint32_t checksum(std::span<const std::byte> bytes);

// Copies and sums up in one pass over blocks that fit a cache. What is summed is the copy. It feeds
// `sum`, to which the rule of update() about pieces applies.
void copy_and_checksum(std::span<const std::byte> source, std::byte* destination, Checksum& sum);

}  // namespace dflash
