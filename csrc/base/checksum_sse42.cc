// The checksum's loops on the crc32 instruction, whose latency of 3 cycles four lanes hide at one
// per cycle. The file is compiled with SSE4.2, hence there is no std:: code here: an inline
// function instantiated in this file could be the copy that the linker keeps.
// SPDX-License-Identifier: Apache-2.0
#include "base/checksum_kernels.h"

#if defined(__x86_64__)
#include <nmmintrin.h>

namespace dflash::internal {
namespace {

uint64_t load_word(const std::byte* bytes) {
  uint64_t word;
  __builtin_memcpy(&word, bytes, sizeof word);
  return word;
}

}  // namespace

void feed_lanes_instruction(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks) {
  uint64_t lane0 = lanes[0], lane1 = lanes[1], lane2 = lanes[2], lane3 = lanes[3];
  for (size_t block = 0; block < num_blocks; ++block, bytes += 32) {
    lane0 = _mm_crc32_u64(lane0, load_word(bytes));
    lane1 = _mm_crc32_u64(lane1, load_word(bytes + 8));
    lane2 = _mm_crc32_u64(lane2, load_word(bytes + 16));
    lane3 = _mm_crc32_u64(lane3, load_word(bytes + 24));
  }
  lanes[0] = static_cast<uint32_t>(lane0);
  lanes[1] = static_cast<uint32_t>(lane1);
  lanes[2] = static_cast<uint32_t>(lane2);
  lanes[3] = static_cast<uint32_t>(lane3);
}

uint32_t crc32c_instruction(uint32_t crc, const std::byte* bytes, size_t num_bytes) {
  uint64_t wide = crc;
  for (; num_bytes >= 8; num_bytes -= 8, bytes += 8) wide = _mm_crc32_u64(wide, load_word(bytes));
  uint32_t narrow = static_cast<uint32_t>(wide);
  for (; num_bytes > 0; --num_bytes, ++bytes)
    narrow = _mm_crc32_u8(narrow, static_cast<unsigned char>(*bytes));
  return narrow;
}

}  // namespace dflash::internal
#endif
