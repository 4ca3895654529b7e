// The payload checksum: four interleaved CRC-32C lanes, so that the crc32 instruction's latency is
// hidden. Definition (normative in docs/protocol.md): split the bytes into 8-byte little-endian
// words; word i feeds lane i % 4 (CRC-32C, initial value ~0, no final inversion); the tail of n % 8
// bytes feeds lane (n / 8) % 4 byte by byte; each lane is multiplied modulo 2^32 by its own odd
// factor (checksum_definition.h has all the numbers); the result is the
// CRC-32C (initial ~0, finally inverted) over the four products written as little-endian u32 and
// then the total byte count as little-endian u64. A CRC of CRCs alone is linear: certain pairs of
// flips in two lanes would cancel in any data; the factors break that. They are odd so that no
// change of a lane is lost.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace dflash {

class Checksum {
 public:
  // Feeds bytes. Every piece but the last must be a multiple of 32 bytes long, so that lanes stay
  // aligned.
  void update(std::span<const std::byte> bytes);
  uint32_t finish() const;

 private:
  uint32_t lanes_[4] = {~0u, ~0u, ~0u, ~0u};
  uint64_t total_bytes_ = 0;
};

uint32_t checksum(std::span<const std::byte> bytes);

// memcpy and checksum in one pass over cache-sized blocks; feeds `sum` (same piece rule as
// update()).
void copy_and_checksum(std::span<const std::byte> source, std::byte* destination, Checksum& sum);

}  // namespace dflash
