// How rows reach the kernels of numerics class int8-groups. 256 inputs (a K block) are one record:
// codes, in both orders in which weights come, with scales and sums. The scale of a group of 32
// inputs is its largest magnitude / 127; a code is x / scale rounded half to even, at most 127. A
// group whose scale is zero has codes 0; one that holds NaN or infinity has codes 0 and a NaN
// scale. These are plain loops, which the compiler vectorises for each kernel file. They are
// templates over the file's vector type, so that no file's instantiations are linked into another.
// No std:: code either: its instantiations could be linked into portable callers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::compute {

inline constexpr uint32_t kInt8BlockInputs = 256;
inline constexpr uint32_t kInt8GroupInputs = 32;

// One record of an encoded row: 256 inputs in 8 groups.
struct Int8Block {
  alignas(64) int8_t ascending[kInt8BlockInputs];
  // The same codes in the order in which the nibbles of a word come out: of every eight inputs
  // 0 2 4 6, then 1 3 5 7.
  int8_t paired[kInt8BlockInputs];
  float scales[8];
  float scaled_sums[8];     // scale * (sum of the group's codes), for affine formats
  int32_t sums[16];         // sums of 16 codes each
  float scaled_halves[16];  // scale * sums, for affine formats with groups of 16
};
static_assert(sizeof(Int8Block) == 704);

// Quantises a group: `values` and `codes` are [32]. Returns false where all codes are zero, which
// the caller then writes itself; `*scale` is 0 or NaN.
template <class V>
[[gnu::always_inline]] inline bool quantize_int8(const float* values, float* scale,
                                                 int32_t* codes) {
  // Compared as integers, magnitudes keep their order, with infinity and NaN above all numbers.
  int32_t magnitude = 0;
  for (uint32_t i = 0; i < kInt8GroupInputs; ++i) {
    int32_t bits;
    __builtin_memcpy(&bits, values + i, sizeof(bits));
    bits &= 0x7fffffff;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  float largest;
  __builtin_memcpy(&largest, &magnitude, sizeof(largest));
  *scale = magnitude < 0x7f800000 ? largest / 127.0f : __builtin_nanf("");
  if (!(*scale > 0.0f)) return false;
  const float divisor = *scale;
  for (uint32_t i = 0; i < kInt8GroupInputs; ++i) {
    // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
    const float shifted = values[i] / divisor + 12582912.0f;
    int32_t bits;
    __builtin_memcpy(&bits, &shifted, sizeof(bits));
    bits -= 0x4b400000;
    // A subnormal scale is rounded so coarsely that quotients reach 190, hence the clamp.
    bits = bits < -127 ? -127 : bits;
    codes[i] = bits > 127 ? 127 : bits;
  }
  return true;
}

// Returns the bytes of eight codes with those at even places first, then those at odd ones.
template <class V>
[[gnu::always_inline]] inline uint64_t pair_codes(uint64_t bytes) {
  uint64_t even = bytes & 0x00ff00ff00ff00ffull, odd = bytes >> 8 & 0x00ff00ff00ff00ffull;
  even = (even | even >> 8) & 0x0000ffff0000ffffull;
  odd = (odd | odd >> 8) & 0x0000ffff0000ffffull;
  even = (even | even >> 16) & 0x00000000ffffffffull;
  odd = (odd | odd >> 16) & 0x00000000ffffffffull;
  return even | odd << 32;
}
// Encodes group `g` of a block from 32 values.

template <class V>
[[gnu::always_inline]] inline void encode_int8_group(const float* values, uint32_t g,
                                                     Int8Block& block) {
  int32_t codes[kInt8GroupInputs];
  if (!quantize_int8<V>(values, &block.scales[g], codes)) __builtin_memset(codes, 0, sizeof(codes));
  int32_t sums[2] = {0, 0};
  for (uint32_t i = 0; i < 16; ++i) sums[0] += codes[i];
  for (uint32_t i = 16; i < 32; ++i) sums[1] += codes[i];
  block.sums[2 * g] = sums[0];
  block.sums[2 * g + 1] = sums[1];
  block.scaled_halves[2 * g] = block.scales[g] * static_cast<float>(sums[0]);
  block.scaled_halves[2 * g + 1] = block.scales[g] * static_cast<float>(sums[1]);
  block.scaled_sums[g] = block.scales[g] * static_cast<float>(sums[0] + sums[1]);
  int8_t* ascending = block.ascending + kInt8GroupInputs * g;
  for (uint32_t i = 0; i < kInt8GroupInputs; ++i) ascending[i] = static_cast<int8_t>(codes[i]);
  uint64_t eights[4];
  __builtin_memcpy(eights, ascending, sizeof(eights));
  for (uint32_t i = 0; i < 4; ++i) eights[i] = pair_codes<V>(eights[i]);
  __builtin_memcpy(block.paired + kInt8GroupInputs * g, eights, sizeof(eights));
}

// KernelSet::encoded_bytes and KernelSet::encode of this class.
template <class V>
size_t int8_row_bytes(uint32_t count) {
  return (size_t{count} + kInt8BlockInputs - 1) / kInt8BlockInputs * sizeof(Int8Block);
}

template <class V>
void encode_int8_row(const float* from, uint32_t count, std::byte* to) {
  Int8Block* blocks = reinterpret_cast<Int8Block*>(to);
  uint32_t k = 0;
  for (; k + kInt8GroupInputs <= count; k += kInt8GroupInputs) {
    encode_int8_group<V>(from + k, k % kInt8BlockInputs / kInt8GroupInputs,
                         blocks[k / kInt8BlockInputs]);
  }
  if (k == count) return;
  float last[kInt8GroupInputs] = {};  // zeros behind the row's end add nothing
  __builtin_memcpy(last, from + k, sizeof(float) * (count - k));
  encode_int8_group<V>(last, k % kInt8BlockInputs / kInt8GroupInputs, blocks[k / kInt8BlockInputs]);
}

}  // namespace dflash::compute
