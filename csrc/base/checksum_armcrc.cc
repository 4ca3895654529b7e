// The checksum's loops on AArch64's CRC32C instructions, whose latency of 2 to 3 cycles four lanes
// hide at one per cycle. The file is compiled with the CRC extension, hence there is no std:: code
// here: an inline function instantiated in this file could be the copy that the linker keeps.
// SPDX-License-Identifier: Apache-2.0
#include "base/checksum_kernels.h"

#if defined(__aarch64__)
#include <arm_acle.h>

namespace dflash::internal {
namespace {

uint64_t load_word(const std::byte* bytes) {
  uint64_t word;
  __builtin_memcpy(&word, bytes, sizeof word);
  return word;
}

}  // namespace

void feed_lanes_instruction(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks) {
  uint32_t lane0 = lanes[0], lane1 = lanes[1], lane2 = lanes[2], lane3 = lanes[3];
  for (size_t block = 0; block < num_blocks; ++block, bytes += 32) {
    lane0 = __crc32cd(lane0, load_word(bytes));
    lane1 = __crc32cd(lane1, load_word(bytes + 8));
    lane2 = __crc32cd(lane2, load_word(bytes + 16));
    lane3 = __crc32cd(lane3, load_word(bytes + 24));
  }
  lanes[0] = lane0;
  lanes[1] = lane1;
  lanes[2] = lane2;
  lanes[3] = lane3;
}

uint32_t crc32c_instruction(uint32_t crc, const std::byte* bytes, size_t num_bytes) {
  for (; num_bytes >= 8; num_bytes -= 8, bytes += 8) crc = __crc32cd(crc, load_word(bytes));
  for (; num_bytes > 0; --num_bytes, ++bytes) crc = __crc32cb(crc, static_cast<uint8_t>(*bytes));
  return crc;
}

}  // namespace dflash::internal
#endif
