// The seam between checksum.cc and instruction sets. Both kinds of loops give the same bits.
// Private to base and its tests.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::internal {

// Feeds `num_blocks` blocks of 32 bytes; word i of a block goes to lane i.
void feed_lanes_table(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks);
// Continues a CRC-32C from `crc` over `num_bytes` bytes, without inversions.
uint32_t crc32c_table(uint32_t crc, const std::byte* bytes, size_t num_bytes);

// The same with the processor's own instruction; call them only where has_crc32_instruction().
#if defined(__x86_64__) || defined(__aarch64__)
void feed_lanes_instruction(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks);
uint32_t crc32c_instruction(uint32_t crc, const std::byte* bytes, size_t num_bytes);
bool has_crc32_instruction();
#endif

}  // namespace dflash::internal
