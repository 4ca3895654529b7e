// The checksum of checksum.h: its lanes and tail, the loops with tables, and the choice between
// these and the crc32 instruction.
// SPDX-License-Identifier: Apache-2.0
#include "base/checksum.h"

#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#include <array>
#include <cstring>

#include "base/checksum_definition.h"
#include "base/checksum_kernels.h"
#include "base/result.h"

namespace dflash {
namespace internal {
namespace {

constexpr size_t kBlockBytes = kChecksumLanes * kChecksumWordBytes;  // one word for each lane

using Tables = std::array<std::array<uint32_t, 256>, 8>;

// tables[k][b] is the register after byte b and then k zero bytes ("slicing by 8").
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1u) != 0 ? kChecksumPolynomial : 0u);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t k = 1; k < 8; ++k)
      tables[k][byte] = (tables[k - 1][byte] >> 8) ^ tables[0][tables[k - 1][byte] & 0xffu];
  }
  return tables;
}
constexpr Tables kTables = make_tables();

uint32_t byte_at(const std::byte* bytes, size_t index) {
  return std::to_integer<uint32_t>(bytes[index]);
}

uint32_t feed_word(uint32_t crc, const std::byte* bytes) {
  return kTables[7][(crc ^ byte_at(bytes, 0)) & 0xffu] ^
         kTables[6][((crc >> 8) ^ byte_at(bytes, 1)) & 0xffu] ^
         kTables[5][((crc >> 16) ^ byte_at(bytes, 2)) & 0xffu] ^
         kTables[4][((crc >> 24) ^ byte_at(bytes, 3)) & 0xffu] ^ kTables[3][byte_at(bytes, 4)] ^
         kTables[2][byte_at(bytes, 5)] ^ kTables[1][byte_at(bytes, 6)] ^
         kTables[0][byte_at(bytes, 7)];
}

}  // namespace

void feed_lanes_table(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks) {
  for (size_t block = 0; block < num_blocks; ++block, bytes += kBlockBytes) {
    for (size_t lane = 0; lane < 4; ++lane) lanes[lane] = feed_word(lanes[lane], bytes + 8 * lane);
  }
}

uint32_t crc32c_table(uint32_t crc, const std::byte* bytes, size_t num_bytes) {
  for (; num_bytes >= 8; num_bytes -= 8, bytes += 8) crc = feed_word(crc, bytes);
  for (; num_bytes > 0; --num_bytes, ++bytes)
    crc = (crc >> 8) ^ kTables[0][(crc ^ byte_at(bytes, 0)) & 0xffu];
  return crc;
}

#if defined(__x86_64__)
bool has_crc32_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
#elif defined(__aarch64__)
// This reads a word that the kernel left in memory at start, without a system call.
bool has_crc32_instruction() { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

namespace {

void feed_lanes(uint32_t lanes[4], const std::byte* bytes, size_t num_blocks) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (has_crc32_instruction()) return feed_lanes_instruction(lanes, bytes, num_blocks);
#endif
  feed_lanes_table(lanes, bytes, num_blocks);
}

uint32_t crc32c(uint32_t crc, const std::byte* bytes, size_t num_bytes) {
#if defined(__x86_64__) || defined(__aarch64__)
  if (has_crc32_instruction()) return crc32c_instruction(crc, bytes, num_bytes);
#endif
  return crc32c_table(crc, bytes, num_bytes);
}

void store_little_endian(uint64_t value, size_t num_bytes, std::byte* out) {
  for (size_t i = 0; i < num_bytes; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
}

}  // namespace
}  // namespace internal

void Checksum::update(std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  check(total_bytes_ % internal::kBlockBytes == 0,
        "a checksum piece follows one that is no multiple of 32 bytes");
  const size_t num_blocks = bytes.size() / internal::kBlockBytes;
  internal::feed_lanes(lanes_, bytes.data(), num_blocks);
  // At most three whole words and seven bytes are left. A word's lane is its index in the block.
  std::span<const std::byte> rest = bytes.subspan(num_blocks * internal::kBlockBytes);
  for (size_t lane = 0; !rest.empty(); ++lane) {
    const size_t piece = rest.size() < 8 ? rest.size() : 8;
    lanes_[lane] = internal::crc32c(lanes_[lane], rest.data(), piece);
    rest = rest.subspan(piece);
  }
  total_bytes_ += bytes.size();
}

uint32_t Checksum::finish() const {
  std::byte summary[24];
  for (uint32_t lane = 0; lane < kChecksumLanes; ++lane) {
    internal::store_little_endian(lanes_[lane] * checksum_lane_factor(lane), 4, summary + 4 * lane);
  }
  internal::store_little_endian(total_bytes_, 8, summary + 16);
  return ~internal::crc32c(~0u, summary, sizeof summary);
}

uint32_t checksum(std::span<const std::byte> bytes) {
  Checksum sum;
  sum.update(bytes);
  return sum.finish();
}

void copy_and_checksum(std::span<const std::byte> source, std::byte* destination, Checksum& sum) {
  // A block and its copy stay in any first-level cache of 32 KiB or more.
  constexpr size_t kCopyBytes = 16 << 10;
  while (!source.empty()) {
    const size_t piece = source.size() < kCopyBytes ? source.size() : kCopyBytes;
    std::memcpy(destination, source.data(), piece);
    // The copy is what will be used, so the copy is what is summed. A peer may rewrite the source
    // meanwhile.
    sum.update({destination, piece});
    destination += piece;
    source = source.subspan(piece);
  }
}

}  // namespace dflash
