// How a vector type V reads quantised panels (panel_layout.h). A struct per format opens a group of
// inputs and yields the float32 weights of one input for the panel's two vectors. The operations
// and their order are those of compute/formats/dequantize.h, so the bits are too. Included by
// canonical_products.h; no std:: code (it says why). Everything here is always inlined, because
// groups and steps are meant to live in registers.
//
// A format F offers:
//   kStep                             inputs per step
//   open(record, group) -> Group      what all inputs of the group share
//   step(group, s) -> Step            what the inputs of step s share
//   weights(group, step, j, pair)     the weights of input kStep * s + j
//
// Tables of 16 entries turn four bits into a float in one permutation, which ignores the bits above
// them in its index.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/panels/panel_layout.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute {

// The values of four-bit codes: as they are, moved by eight or sixteen, and bit 0 as a fifth bit.
inline constexpr float kPlain[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
inline constexpr float kMinusEight[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
inline constexpr float kMinusSixteen[16] = {-16, -15, -14, -13, -12, -11, -10, -9,
                                            -8,  -7,  -6,  -5,  -4,  -3,  -2,  -1};
inline constexpr float kFifthBit[16] = {0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16};

// Where the fields of a group lie, for panels of 2 * V::kLanes outputs.
template <class V, WeightFormat kFormat>
struct GroupAddress {
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr size_t kWidth = 2 * V::kLanes;
  static const uint8_t* scales(const uint8_t* record, uint32_t group) {
    return record + (kLayout.header_bytes + group * kLayout.group_bytes()) * kWidth;
  }
  static const uint8_t* codes(const uint8_t* record, uint32_t group) {
    return scales(record, group) + kLayout.scale_bytes * kWidth;
  }
};

// Reads the scales of a group, widened to float32, and its offset where the format is affine.
template <class V, WeightFormat kFormat>
struct GroupScale {
  using F = typename V::F;
  using Address = GroupAddress<V, kFormat>;
  // The scale of the group for lanes [half * kLanes, (half + 1) * kLanes).
  [[gnu::always_inline]] static inline F load(const uint8_t* record, uint32_t group, int half) {
    const uint8_t* at = Address::scales(record, group);
    const int lane = half * V::kLanes;
    if constexpr (kFormat == WeightFormat::kInt8G32 || kFormat == WeightFormat::kInt4G32 ||
                  kFormat == WeightFormat::kFp8E4m3B128) {
      return V::load(reinterpret_cast<const float*>(at) + lane);
    } else if constexpr (kFormat == WeightFormat::kInt4Zp) {
      return V::from_bits(
          V::merge(V::set1i(31), V::set1i(0), V::load_words(at + sizeof(float) * lane)));
    } else if constexpr (kFormat == WeightFormat::kMxfp4) {
      return V::load_exponents(at + lane);
    } else if constexpr (kFormat == WeightFormat::kQ6K || kFormat == WeightFormat::kIq4Xs ||
                         kFormat == WeightFormat::kQ3K) {
      return V::mul(V::load_f16(record + 2 * lane), V::load_i8(at + lane));
    } else if constexpr (kFormat == WeightFormat::kQ2K) {
      return V::mul(V::load_f16(record + 2 * lane),
                    V::look_up(V::table(kPlain), V::widen_u8(at + lane)));
    } else if constexpr (kFormat == WeightFormat::kQ4K || kFormat == WeightFormat::kQ5K) {
      return V::mul(V::load_f16(record + 2 * lane), V::load_u8(at + lane));
    } else {
      return V::load_f16(at + 2 * lane);
    }
  }
  // The group's offset with its sign changed, for the same lanes; the products are exact.
  [[gnu::always_inline]] static inline F minus_offset(const uint8_t* record, uint32_t group,
                                                      int half) {
    constexpr size_t kWidth = Address::kWidth;
    const uint8_t* at = Address::scales(record, group);
    const int lane = half * V::kLanes;
    if constexpr (kFormat == WeightFormat::kQ4_1 || kFormat == WeightFormat::kQ5_1) {
      return V::load_f16(at + 2 * kWidth + 2 * lane);
    } else if constexpr (kFormat == WeightFormat::kInt4Zp) {
      const auto zero = V::merge(V::set1i(31), V::load_words(at + 4 * lane), V::set1i(0));
      return V::sub(V::set1(-0.0f), V::mul(load(record, group, half), V::to_float(zero)));
    } else {
      F minimum;
      if constexpr (kFormat == WeightFormat::kQ2K)
        minimum = V::look_up(V::table(kPlain), V::shift_right(V::widen_u8(at + lane), 4));
      else
        minimum = V::load_u8(at + kWidth + lane);
      // Subtracting from -0 changes the sign of zeros too.
      return V::sub(V::set1(-0.0f), V::mul(V::load_f16(record + 2 * kWidth + 2 * lane), minimum));
    }
  }
};

// The weights of int8_g32 and q8_0: q * scale.
template <class V, WeightFormat kFormat>
struct ByteFormat {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr uint32_t kStep = 4;
  struct Group {
    F scale[2];
    const uint8_t* codes;
  };
  struct Step {
    I words[2];
  };
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, kFormat>;
    return {
        {Scale::load(record, group, 0), Scale::load(record, group, 1)},
        Scale::Address::codes(record, group)
    };
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t s) {
    const uint8_t* at = group.codes + s * 8 * V::kLanes;
    return {
        {V::load_words(at), V::load_words(at + 4 * V::kLanes)}
    };
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      pair[h] =
          V::mul(V::to_float(V::shift_right_signed(V::shift_left(step.words[h], 24 - 8 * j), 24)),
                 group.scale[h]);
    }
  }
};

// The weights of int4_g32, q4_0, iq4_nl, iq4_xs and both mxfp4: value(code) * scale.
template <class V, WeightFormat kFormat>
struct NibbleFormat {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr uint32_t kStep = 8;
  struct Group {
    F scale[2];
    typename V::Table table;
    const uint8_t* codes;
  };
  struct Step {
    I words[2];
  };
  static constexpr const float* values() {
    if constexpr (kFormat == WeightFormat::kMxfp4)
      return kE2m1;
    else if constexpr (kFormat == WeightFormat::kIq4Nl || kFormat == WeightFormat::kIq4Xs)
      return kIq4Levels;
    else
      return kMinusEight;
  }
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, kFormat>;
    return {
        {Scale::load(record, group, 0), Scale::load(record, group, 1)},
        V::table(values()),
        Scale::Address::codes(record, group)
    };
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t s) {
    const uint8_t* at = group.codes + s * 8 * V::kLanes;
    return {
        {V::load_words(at), V::load_words(at + 4 * V::kLanes)}
    };
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      pair[h] =
          V::mul(V::look_up(group.table, V::shift_right(step.words[h], 4 * j)), group.scale[h]);
    }
  }
};

// The weights of q4_k, q5_k, q4_1, q5_1 and int4_zp, code * scale - offset, and those of q5_0,
// (code - 16) * scale.
template <class V, WeightFormat kFormat>
struct AffineFormat {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr uint32_t kStep = 8;
  static constexpr bool kHasFifthBit = has_fifth_bit(kFormat);
  struct Group {
    F scale[2];
    F minus_offset[2];
    typename V::Table table, fifth;
    const uint8_t* codes;
  };
  struct Step {
    I words[2];
    I fifth[2];
  };
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, kFormat>;
    Group found{
        {Scale::load(record, group, 0), Scale::load(record, group, 1)},
        {},
        V::table(is_affine(kFormat) ? kPlain : kMinusSixteen),
        V::table(kFifthBit),
        Scale::Address::codes(record, group)
    };
    if constexpr (is_affine(kFormat)) {
      for (int h = 0; h < 2; ++h) found.minus_offset[h] = Scale::minus_offset(record, group, h);
    }
    return found;
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t s) {
    const uint8_t* at = group.codes + s * 8 * V::kLanes;
    Step found{
        {V::load_words(at), V::load_words(at + 4 * V::kLanes)},
        {}
    };
    if constexpr (kHasFifthBit) {
      const uint8_t* fifth = group.codes + 16 * 2 * V::kLanes;
      for (int h = 0; h < 2; ++h)
        found.fifth[h] = V::shift_right(V::load_words(fifth + h * 4 * V::kLanes), 8 * s);
    }
    return found;
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      F code = V::look_up(group.table, V::shift_right(step.words[h], 4 * j));
      if constexpr (kHasFifthBit)
        code = V::add(code, V::look_up(group.fifth, V::shift_right(step.fifth[h], j)));
      // The product is exact (17 bits of d * scale and 5 of the code; 19 and 4 in int4_zp), so that
      // the fma rounds once, as the twin's subtraction or addition does.
      if constexpr (is_affine(kFormat))
        pair[h] = V::fma(group.scale[h], code, group.minus_offset[h]);
      else
        pair[h] = V::mul(group.scale[h], code);
    }
  }
};

// Moves bits from place `from` of each lane to place `to`.
template <class V>
[[gnu::always_inline]] inline typename V::I move_bits(typename V::I bits, uint32_t from,
                                                      uint32_t to) {
  return from == to  ? bits
         : from < to ? V::shift_left(bits, to - from)
                     : V::shift_right(bits, from - to);
}

// The weights of q6_k: (d * scale) * (code - 32) + 0. The code becomes the upper mantissa bits of
// f = 1 + code / 64, and 64 * scale * f - 96 * scale is the weight, rounded once: 64 * scale and
// 96 * scale are exact (11 + 7 + 2 bits), and a fused difference of equals is +0.
template <class V>
struct SixBitFormat {
  using F = typename V::F;
  using I = typename V::I;
  static constexpr uint32_t kStep = 16;
  static constexpr uint32_t kCode = 17;  // lowest bit of the top six of a float32 mantissa
  struct Group {
    F scale[2];
    F minus_offset[2];
    const uint8_t* codes;
  };
  struct Step {
    I codes[4][2];
  };  // [2w + p][vector]: byte b is the code of input 8w + 2b + p
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, WeightFormat::kQ6K>;
    const F steps = V::set1(64.0f), middle = V::set1(-1.5f);
    const F scale[2] = {V::mul(Scale::load(record, group, 0), steps),
                        V::mul(Scale::load(record, group, 1), steps)};
    return {
        {scale[0], scale[1]},
        {V::mul(scale[0], middle), V::mul(scale[1], middle)},
        Scale::Address::codes(record, group)
    };
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t) {
    constexpr size_t kWords = 4 * V::kLanes;  // bytes of a vector of words
    Step found;
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      const I upper = V::load_words(group.codes + (4 + h) * kWords);
#pragma GCC unroll 4
      for (uint32_t q = 0; q < 4; ++q) {
        const I nibbles = V::load_words(group.codes + (q / 2 * 2 + h) * kWords);
        found.codes[q][h] =
            V::merge(V::set1i(0x0f0f0f0f), q % 2 == 0 ? nibbles : V::shift_right(nibbles, 4),
                     move_bits<V>(upper, 2 * q, 4));
      }
    }
    return found;
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const I code = move_bits<V>(step.codes[j / 8 * 2 + j % 2][h], j % 8 / 2 * 8, kCode);
      pair[h] =
          V::fma(group.scale[h], V::one_and(code, V::set1i(63 << kCode)), group.minus_offset[h]);
    }
  }
};

// The weights of fp8: value(code) * scale.
template <class V>
struct Fp8Format {
  using F = typename V::F;
  static constexpr uint32_t kStep = 4;
  struct Group {
    F scale[2];
    const uint8_t* codes;
  };
  struct Step {
    const uint8_t* codes;
  };
  [[gnu::always_inline]] static inline Group open(const uint8_t* record, uint32_t group) {
    using Scale = GroupScale<V, WeightFormat::kFp8E4m3B128>;
    return {
        {Scale::load(record, group, 0), Scale::load(record, group, 1)},
        Scale::Address::codes(record, group)
    };
  }
  [[gnu::always_inline]] static inline Step step(const Group& group, uint32_t s) {
    return {group.codes + s * kStep * 2 * V::kLanes};
  }
  [[gnu::always_inline]] static inline void weights(const Group& group, const Step& step,
                                                    uint32_t j, F* pair) {
    V::load_e4m3(step.codes + j * 2 * V::kLanes, pair);
    for (int h = 0; h < 2; ++h) pair[h] = V::mul(pair[h], group.scale[h]);
  }
};

}  // namespace dflash::compute
