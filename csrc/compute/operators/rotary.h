// Rotary position embedding of the heads of a row. A pair (x1, x2) of a head becomes
//
//   y1 = fma(x1, c1, 0 - x2 * s1)
//   y2 = fma(x2, c2, x1 * s2)
//
// in float32, where c and s are the row's cosines and sines; y is rounded once, to the dtype of the
// output. What a head has beside its rotated values is copied, as base/dtype.h converts it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/operators/lanes.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

// Which values of a head's rotary_dim rotated ones are pair i, of rotary_dim / 2.
enum class RotaryLayout : uint8_t {
  kHalves,       // i and i + rotary_dim / 2
  kInterleaved,  // 2i and 2i + 1
  // They are read interleaved and written as halves, as DeepSeek's attention does.
  kInterleavedToHalves
};

struct RotaryForm {
  uint32_t num_heads = 0;
  uint32_t head_dim = 0;
  uint32_t rotary_dim = 0;     // even, at most head_dim - rotary_offset
  uint32_t rotary_offset = 0;  // the first rotated value of a head
  RotaryLayout layout = RotaryLayout::kHalves;
  // Cosines and sines are [num_rows, rotary_dim], each for the value that stands at its place in
  // the output; else they are [num_rows, rotary_dim / 2], one for both values of a pair.
  bool has_full_tables = false;
};

// The pairs of one head for a kernel: all arrays are [count]. first_out may be `first`, and
// second_out may be `second`.
struct RotaryPairs {
  const float *first = nullptr, *second = nullptr;
  const float *first_cos = nullptr, *first_sin = nullptr;
  const float *second_cos = nullptr, *second_sin = nullptr;
  float *first_out = nullptr, *second_out = nullptr;
  uint32_t count = 0;
};

template <class V>
[[gnu::flatten]] void rotate_pairs(const RotaryPairs& pairs) {
  using F = typename V::F;
  in_blocks<V>(pairs.count, [&](uint32_t at, uint32_t count) {
    const auto load = [&](const float* from) { return load_block<V>(from + at, count, 0.0f); };
    const LaneBlock<V> x1 = load(pairs.first), x2 = load(pairs.second);
    const LaneBlock<V> y1 = map_block<V>(
        [](F a, F b, F c, F s) { return V::fma(a, c, V::sub(V::set1(0.0f), V::mul(b, s))); }, x1,
        x2, load(pairs.first_cos), load(pairs.first_sin));
    const LaneBlock<V> y2 =
        map_block<V>([](F a, F b, F c, F s) { return V::fma(b, c, V::mul(a, s)); }, x1, x2,
                     load(pairs.second_cos), load(pairs.second_sin));
    store_block<V>(pairs.first_out + at, y1, count);
    store_block<V>(pairs.second_out + at, y2, count);
  });
}

}  // namespace dflash::compute
