// Normalisation of a row, which is one formula for every instruction set and for the reference:
//
//   x       the row, in float32; with a residual, rows + residual, added in float32 and, if the
//   form
//           says so, first rounded to the dtype in which the sum is written back
//   rms     d = x
//   layer   mean = (sum of x) / width;  d = x - mean
//   both    r = 1 / sqrt((sum of d * d) / width + epsilon);  y = (d * r) * w, then fma: + b
//
// where w is the weight, 1 + weight, or 1 where there is none, and b is added only where there is
// one. The sum of squares is fma(d, d, partial). Sums are those of lanes.h; quotient and root are
// IEEE's. y is rounded once, to the dtype of the output.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/operators/lanes.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

enum class NormKind : uint8_t { kRms, kLayer };

struct NormForm {
  NormKind kind = NormKind::kRms;
  float epsilon = 1e-6f;
  bool adds_one = false;  // w = 1 + weight
  // With a residual: x is the sum as it was written back, not the sum in float32.
  bool normalizes_rounded_sum = false;
};

// One row for a kernel. `out` may be `x`.
struct NormRow {
  NormForm form;
  const float* x;       // [width]
  const float* weight;  // [width]; null: all 1
  const float* bias;    // [width]; null: none
  float* out;           // [width]
  uint32_t width;
};

// out = (d * r) * w + b for every element, where `d` may be row.out.
template <class V>
inline void scale_normalized(const NormRow& row, const float* d, const LaneBlock<V>& squares) {
  using F = typename V::F;
  const F width = V::set1(static_cast<float>(row.width)), one = V::set1(1.0f);
  const F mean_square = V::div(V::set1(sum_in_order<V>(squares)), width);
  const F r = V::div(one, V::sqrt(V::add(mean_square, V::set1(row.form.epsilon))));
  in_blocks<V>(row.width, [&](uint32_t first, uint32_t count) {
    LaneBlock<V> y = load_block<V>(d + first, count, 0.0f);
    y = map_block<V>([&](F x) { return V::mul(x, r); }, y);
    if (row.weight != nullptr) {
      LaneBlock<V> w = load_block<V>(row.weight + first, count, 0.0f);
      if (row.form.adds_one) w = map_block<V>([&](F x) { return V::add(one, x); }, w);
      // A bias is added by the fma that multiplies with w.
      if (row.bias == nullptr)
        y = map_block<V>([](F a, F b) { return V::mul(a, b); }, y, w);
      else
        y = map_block<V>([](F a, F b, F c) { return V::fma(a, b, c); }, y, w,
                         load_block<V>(row.bias + first, count, 0.0f));
    } else if (row.bias != nullptr) {
      y = map_block<V>([](F a, F b) { return V::add(a, b); }, y,
                       load_block<V>(row.bias + first, count, 0.0f));
    }
    store_block<V>(row.out + first, y, count);
  });
}

template <class V>
[[gnu::flatten]] void rms_norm_row(const NormRow& row) {
  using F = typename V::F;
  LaneBlock<V> squares = fill_block<V>(0.0f);
  in_blocks<V>(row.width, [&](uint32_t first, uint32_t count) {
    squares = map_block<V>([](F x, F sum) { return V::fma(x, x, sum); },
                           load_block<V>(row.x + first, count, 0.0f), squares);
  });
  scale_normalized<V>(row, row.x, squares);
}

template <class V>
[[gnu::flatten]] void layer_norm_row(const NormRow& row) {
  using F = typename V::F;
  LaneBlock<V> sums = fill_block<V>(0.0f), squares = sums;
  in_blocks<V>(row.width, [&](uint32_t first, uint32_t count) {
    sums = map_block<V>([](F x, F sum) { return V::add(sum, x); },
                        load_block<V>(row.x + first, count, 0.0f), sums);
  });
  const F mean = V::div(V::set1(sum_in_order<V>(sums)), V::set1(static_cast<float>(row.width)));
  in_blocks<V>(row.width, [&](uint32_t first, uint32_t count) {
    const LaneBlock<V> d = map_block<V>([&](F x) { return V::sub(x, mean); },
                                        load_block<V>(row.x + first, count, 0.0f));
    store_block<V>(row.out + first, d, count);
    // Read back, so that lanes behind the row's end add nothing.
    squares = map_block<V>([](F x, F sum) { return V::fma(x, x, sum); },
                           load_block<V>(row.out + first, count, 0.0f), squares);
  });
  scale_normalized<V>(row, row.out, squares);
}

}  // namespace dflash::compute
