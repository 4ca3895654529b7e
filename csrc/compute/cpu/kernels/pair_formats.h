// How a vector type V reads panels of q2_k and q3_k, whose codes have two and three bits, in groups
// of 16 inputs (panel_layout.h). PairFormat offers what quantized_formats.h asks of a format. No
// std:: code (canonical_products.h says why).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/quantized_formats.h"

namespace dflash::compute {

// The values of two-bit and three-bit codes, by the low bits of an index.
inline constexpr float kTwoBits[16] = {0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3};
inline constexpr float kMinusFour[16] = {-4, -3, -2, -1, 0, 1, 2, 3, -4, -3, -2, -1, 0, 1, 2, 3};

// The codes of a group of q2_k or q3_k for one half of a panel, as panel_layout.h has them.
template <class V, WeightFormat kFormat>
struct PairCodes {
  using I = typename V::I;
  I pairs, thirds;

  [[gnu::always_inline]] static inline PairCodes load(const uint8_t* codes, int half) {
    constexpr size_t kWords = 4 * V::kLanes;  // bytes of a vector of words
    const auto h = static_cast<size_t>(half);
    PairCodes found{V::load_words(codes + h * kWords), {}};
    if constexpr (kFormat == WeightFormat::kQ3K) {
      const I bits = V::widen_u16(codes + 2 * kWords + h * kWords / 2);
      found.thirds = V::merge(V::set1i(0x0000ffff), bits, V::shift_left(bits, 12));
    }
    return found;
  }
  // The codes of inputs 4s..4s + 3, one a byte, whose bits above the code mean nothing.
  [[gnu::always_inline]] inline I four(uint32_t s) const {
    const I found = V::shift_right(pairs, 2 * s);
    if constexpr (kFormat != WeightFormat::kQ3K) return found;
    return V::merge(V::set1i(0x04040404), move_bits<V>(thirds, s, 2), found);
  }
};

// The weights of q2_k: (d * scale) * code - (dmin * minimum). The weights of q3_k:
// (d * scale) * (code - 4).
template <class V, WeightFormat kFormat>
struct PairFormat {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr uint32_t kStep = 16;
  struct Group {
    F scale[2];
    F minus_offset[2];
    typename V::Table table;
    const uint8_t* codes;
  };
  struct Step {
    I fours[4][2];
  };
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, kFormat>;
    Group found{
        {Scale::load(record, group, 0), Scale::load(record, group, 1)},
        {},
        V::table(is_affine(kFormat) ? kTwoBits : kMinusFour),
        Scale::Address::codes(record, group)
    };
    if constexpr (is_affine(kFormat)) {
      for (int h = 0; h < 2; ++h) found.minus_offset[h] = Scale::minus_offset(record, group, h);
    }
    return found;
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t) {
    Step found;
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const auto codes = PairCodes<V, kFormat>::load(group.codes, h);
#pragma GCC unroll 4
      for (uint32_t s = 0; s < 4; ++s) found.fours[s][h] = codes.four(s);
    }
    return found;
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const F code = V::look_up_eight(group.table, V::shift_right(step.fours[j / 4][h], j % 4 * 8));
      // The product is exact (15 bits of d * scale and 2 of the code).
      if constexpr (is_affine(kFormat))
        pair[h] = V::fma(group.scale[h], code, group.minus_offset[h]);
      else
        pair[h] = V::mul(group.scale[h], code);
    }
  }
};

}  // namespace dflash::compute
