// The checksum against a bit-by-bit reading of its definition; table and instruction give the same
// bits.
// SPDX-License-Identifier: Apache-2.0
#include "base/checksum.h"

#include <doctest/doctest.h>

#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "base/checksum_kernels.h"

namespace dflash {
namespace {

uint32_t bitwise_crc32c(uint32_t crc, const std::byte* bytes, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes; ++i) {
    crc ^= std::to_integer<uint32_t>(bytes[i]);
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return crc;
}

// checksum.h's words, one after the other.
uint32_t checksum_by_definition(const std::vector<std::byte>& bytes) {
  uint32_t lanes[4] = {~0u, ~0u, ~0u, ~0u};
  const size_t num_words = bytes.size() / 8;
  for (size_t word = 0; word < num_words; ++word)
    lanes[word % 4] = bitwise_crc32c(lanes[word % 4], &bytes[8 * word], 8);
  for (size_t i = 8 * num_words; i < bytes.size(); ++i) {
    lanes[num_words % 4] = bitwise_crc32c(lanes[num_words % 4], &bytes[i], 1);
  }
  std::vector<std::byte> summary;
  constexpr uint64_t factors[4] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F};
  for (size_t lane = 0; lane < 4; ++lane) {
    const uint64_t product = lanes[lane] * factors[lane];
    for (int shift = 0; shift < 32; shift += 8)
      summary.push_back(static_cast<std::byte>(product >> shift));
  }
  for (int shift = 0; shift < 64; shift += 8)
    summary.push_back(static_cast<std::byte>(uint64_t{bytes.size()} >> shift));
  return ~bitwise_crc32c(~0u, summary.data(), summary.size());
}

std::vector<std::byte> random_bytes(size_t num_bytes, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(num_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

TEST_CASE("the checksum follows its definition at every length up to 300") {
  for (size_t num_bytes = 0; num_bytes <= 300; ++num_bytes) {
    const auto bytes = random_bytes(num_bytes, static_cast<uint32_t>(num_bytes));
    CHECK_MESSAGE(checksum(bytes) == checksum_by_definition(bytes), num_bytes, " bytes");
  }
}

TEST_CASE("the table computes the published CRC-32C check value") {
  constexpr std::string_view text = "123456789";
  CHECK(~internal::crc32c_table(~0u, reinterpret_cast<const std::byte*>(text.data()),
                                text.size()) == 0xe3069283u);
}

TEST_CASE("pieces of 32 bytes and a ragged last one give the sum of the whole") {
  const auto bytes = random_bytes(1000, 3);
  const std::span<const std::byte> all(bytes);
  Checksum sum;
  sum.update(all.first(32));
  sum.update(all.subspan(32, 0));
  sum.update(all.subspan(32, 640));
  sum.update(all.subspan(672));
  CHECK(sum.finish() == checksum(bytes));
}

TEST_CASE("copy_and_checksum copies every byte and sums the copy") {
  for (const size_t num_bytes : {0u, 1u, 16383u, 16384u, 16385u, 100'000u}) {
    const auto bytes = random_bytes(num_bytes, 5);
    std::vector<std::byte> copy(num_bytes + 1, std::byte{0xee});
    Checksum sum;
    copy_and_checksum(bytes, copy.data(), sum);
    CHECK(sum.finish() == checksum(bytes));
    CHECK(copy[num_bytes] == std::byte{0xee});
    CHECK((num_bytes == 0 || std::memcmp(copy.data(), bytes.data(), num_bytes) == 0));
  }
}

TEST_CASE("every single flipped bit changes the checksum") {
  auto bytes = random_bytes(77, 9);
  const uint32_t intact = checksum(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    CHECK(checksum(bytes) != intact);
    bytes[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

// A linear way of joining the lanes fails here: the same bit flipped in words 4 b + 2 and 4 b + 4
// then cancels.
TEST_CASE("the same bit flipped in two words less than 16 apart changes the checksum") {
  std::vector<std::byte> bytes = random_bytes(4096, 13);
  const uint32_t intact = checksum(bytes);
  const size_t num_words = bytes.size() / 8;
  size_t num_pairs = 0;
  size_t num_missed = 0;
  for (size_t bit = 0; bit < 64; ++bit) {
    const auto flip = [&](size_t word) {
      bytes[8 * word + bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    };
    for (size_t first = 0; first < num_words; ++first) {
      flip(first);
      for (size_t second = first + 1; second < num_words && second < first + 16;
           ++second, ++num_pairs) {
        flip(second);
        if (checksum(bytes) == intact) ++num_missed;
        flip(second);
      }
      flip(first);
    }
  }
  CHECK(num_pairs == 64 * (512 * 15 - 15 * 16 / 2));
  CHECK(num_missed == 0);
}

#if defined(__x86_64__) || defined(__aarch64__)
TEST_CASE("table and crc32 instruction give the same bits") {
  if (!internal::has_crc32_instruction()) return;
  const auto bytes = random_bytes(4096 + 7, 11);
  for (size_t num_bytes = 0; num_bytes < 64; ++num_bytes) {
    CHECK(internal::crc32c_table(1, bytes.data() + 3, num_bytes) ==
          internal::crc32c_instruction(1, bytes.data() + 3, num_bytes));
  }
  uint32_t by_table[4] = {1, 2, 3, ~0u};
  uint32_t by_instruction[4] = {1, 2, 3, ~0u};
  internal::feed_lanes_table(by_table, bytes.data() + 5, 127);
  internal::feed_lanes_instruction(by_instruction, bytes.data() + 5, 127);
  for (int lane = 0; lane < 4; ++lane) CHECK(by_table[lane] == by_instruction[lane]);
}
#endif

}  // namespace
}  // namespace dflash
