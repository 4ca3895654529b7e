// Blocks of 16 floats over a vector type V: how the row operators walk over a row, and the one
// order in which they sum it. Element i goes into partial sum i % 16, and the partial sums are
// added in the order 0..15, so that the sum does not depend on how many lanes a vector has. Beside
// what experts/activation.h lists, V offers load, store, sqrt (IEEE's), canonical_nan and kLanes.
//
// Nothing here may depend on std::, because files compiled for newer instruction sets instantiate
// it; for the same reason every function is a template. Kernels are [[gnu::flatten]], so that
// blocks stay in registers through all these functions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::compute {

// The lanes of the widest vectors that there are, so that a block is one of those or several of
// others.
inline constexpr uint32_t kBlockLanes = 16;

// 16 floats in as many vectors as they take.
template <class V>
struct LaneBlock {
  static constexpr int kVectors = static_cast<int>(kBlockLanes) / V::kLanes;
  typename V::F part[kVectors];
};

template <class V>
inline LaneBlock<V> fill_block(float value) {
  LaneBlock<V> block;
  for (auto& part : block.part) part = V::set1(value);
  return block;
}

// Loads `count` <= 16 floats; the lanes behind them get `fill`.
template <class V>
inline LaneBlock<V> load_block(const float* from, uint32_t count, float fill) {
  float padded[kBlockLanes];
  if (count < kBlockLanes) {
    for (uint32_t i = 0; i < kBlockLanes; ++i) padded[i] = i < count ? from[i] : fill;
    from = padded;
  }
  LaneBlock<V> block;
  for (int p = 0; p < LaneBlock<V>::kVectors; ++p) block.part[p] = V::load(from + p * V::kLanes);
  return block;
}

// Stores the first `count` <= 16 floats. Every NaN becomes 0x7fc00000, because which payload
// survives an operation is the compiler's choice.
template <class V>
inline void store_block(float* to, const LaneBlock<V>& block, uint32_t count) {
  float padded[kBlockLanes];
  float* at = count < kBlockLanes ? padded : to;
  for (int p = 0; p < LaneBlock<V>::kVectors; ++p)
    V::store(at + p * V::kLanes, V::canonical_nan(block.part[p]));
  if (count < kBlockLanes) {
    for (uint32_t i = 0; i < count; ++i) to[i] = padded[i];
  }
}

// Applies `body` to the vectors that the given blocks have at each place, and returns the block of
// its results.
template <class V, class Body, class... Blocks>
inline LaneBlock<V> map_block(const Body& body, const Blocks&... blocks) {
  LaneBlock<V> result;
  for (int p = 0; p < LaneBlock<V>::kVectors; ++p) result.part[p] = body(blocks.part[p]...);
  return result;
}

// Calls body(first, count) for each block of a row; only the last count can be below 16.
template <class V, class Body>
inline void in_blocks(uint32_t width, const Body& body) {
  uint32_t first = 0;
  for (; first + kBlockLanes <= width; first += kBlockLanes) body(first, kBlockLanes);
  if (first < width) body(first, width - first);
}

// The partial sums, added in the order 0..15.
template <class V>
inline float sum_in_order(const LaneBlock<V>& partials) {
  float lanes[kBlockLanes];
  for (int p = 0; p < LaneBlock<V>::kVectors; ++p)
    V::store(lanes + p * V::kLanes, partials.part[p]);
  float sum = lanes[0];
  for (uint32_t i = 1; i < kBlockLanes; ++i) sum += lanes[i];
  return sum;
}

}  // namespace dflash::compute
