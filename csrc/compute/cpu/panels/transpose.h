// Small transpositions in registers, for packing rows of weights into panels. Without them every
// element would be a scattered store; with them a row of a tile is one store. They use the
// compilers' portable vectors, so that the baseline instruction set of any target suffices.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dflash::compute {

// How many elements make up the side of a tile: as many as fill a vector of 16 bytes.
template <class T>
inline constexpr uint32_t kTile = 16 / sizeof(T);

namespace internal {

using U16x8 = uint16_t __attribute__((vector_size(16)));
using U32x4 = uint32_t __attribute__((vector_size(16)));
using U64x2 = uint64_t __attribute__((vector_size(16)));

template <class V>
V load_vector(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <class V>
void store_vector(void* to, V value) {
  std::memcpy(to, &value, sizeof(value));
}

inline U16x8 low16(U16x8 a, U16x8 b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline U16x8 high16(U16x8 a, U16x8 b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline U32x4 low32(U32x4 a, U32x4 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline U32x4 high32(U32x4 a, U32x4 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
inline U64x2 low64(U64x2 a, U64x2 b) { return __builtin_shufflevector(a, b, 0, 2); }
inline U64x2 high64(U64x2 a, U64x2 b) { return __builtin_shufflevector(a, b, 1, 3); }

}  // namespace internal

// Transposes a tile: target[k * target_stride + s] = rows[s][k] for s, k < 4. The stride counts
// elements.
inline void transpose_tile(const uint32_t* const* rows, uint32_t* target, size_t target_stride) {
  using namespace internal;
  const U32x4 a = load_vector<U32x4>(rows[0]), b = load_vector<U32x4>(rows[1]);
  const U32x4 c = load_vector<U32x4>(rows[2]), d = load_vector<U32x4>(rows[3]);
  const auto ab0 = reinterpret_cast<U64x2>(low32(a, b)),
             ab1 = reinterpret_cast<U64x2>(high32(a, b));
  const auto cd0 = reinterpret_cast<U64x2>(low32(c, d)),
             cd1 = reinterpret_cast<U64x2>(high32(c, d));
  store_vector(target, low64(ab0, cd0));
  store_vector(target + target_stride, high64(ab0, cd0));
  store_vector(target + 2 * target_stride, low64(ab1, cd1));
  store_vector(target + 3 * target_stride, high64(ab1, cd1));
}

// Transposes a tile likewise for s, k < 8.
inline void transpose_tile(const uint16_t* const* rows, uint16_t* target, size_t target_stride) {
  using namespace internal;
  // pairs[2i] holds inputs 0..3 of rows 2i and 2i + 1 side by side, pairs[2i + 1] inputs 4..7.
  U32x4 pairs[8];
  for (uint32_t i = 0; i < 4; ++i) {
    const U16x8 even = load_vector<U16x8>(rows[2 * i]), odd = load_vector<U16x8>(rows[2 * i + 1]);
    pairs[2 * i] = reinterpret_cast<U32x4>(low16(even, odd));
    pairs[2 * i + 1] = reinterpret_cast<U32x4>(high16(even, odd));
  }
  for (uint32_t half = 0; half < 2; ++half) {
    const auto a0 = reinterpret_cast<U64x2>(low32(pairs[half], pairs[2 + half]));
    const auto a1 = reinterpret_cast<U64x2>(high32(pairs[half], pairs[2 + half]));
    const auto b0 = reinterpret_cast<U64x2>(low32(pairs[4 + half], pairs[6 + half]));
    const auto b1 = reinterpret_cast<U64x2>(high32(pairs[4 + half], pairs[6 + half]));
    uint16_t* step = target + 4 * half * target_stride;
    store_vector(step, low64(a0, b0));
    store_vector(step + target_stride, high64(a0, b0));
    store_vector(step + 2 * target_stride, low64(a1, b1));
    store_vector(step + 3 * target_stride, high64(a1, b1));
  }
}

}  // namespace dflash::compute
