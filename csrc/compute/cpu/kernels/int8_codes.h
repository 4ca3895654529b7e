// How panels in the layouts of panel_layout.h become integer codes: four inputs of one output in
// each 32-bit lane, as dot products of bytes take them, with the float32 scale and offset of a
// group. Written once over a vector type V and its integer dot products D:
//
//   kSignedOffset                what as_signed_codes adds to a signed code: 128 where the
//                                instruction wants unsigned bytes, else 0
//   as_signed_codes(I)           four signed codes per lane, as dot<true> takes them
//   dot<kIsSigned>(codes, x, sum)  sum + codes . x per lane, exact; x is signed, and codes are
//                                unsigned and below 64 where not kIsSigned
//   ByteTable, byte_table(int8_t[16]), look_up_bytes(table, I)
//                                16 bytes, looked up by four-bit indices
//   fifth_bits(I, w, p)          byte b of a lane is 16 if bit 8w + 2b + p of that lane is set,
//                                else 0
//
// Included by int8_products.h; no std:: code (canonical_products.h says why).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/int8_rows.h"
#include "compute/cpu/kernels/pair_formats.h"

namespace dflash::compute {

// The levels of iq4_nl and iq4_xs, which are integers already.
inline constexpr int8_t kIq4Codes[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
// The values of e2m1 as 2 * value + 12: doubled they are integers, and the offset makes them
// unsigned.
inline constexpr int8_t kE2m1Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                          12, 11, 10, 9,  8,  6,  4,  0};

// What the codes of a format are. A weight is (code - offset) * scale, or code * scale minus the
// group's own offset where is_affine.
struct CodeTraits {
  uint32_t steps;  // of four inputs each, in a group
  bool is_signed;  // codes are int8; otherwise they are unsigned and below 64
  bool is_paired;  // inputs have the order of Int8Block::paired; otherwise they ascend
  bool is_affine;
  int32_t offset;  // subtracted from every code
};

constexpr CodeTraits code_traits(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt8G32:
    case WeightFormat::kQ8_0:    return {8, true, false, false, 0};
    case WeightFormat::kIq4Nl:
    case WeightFormat::kIq4Xs:   return {8, true, true, false, 0};
    case WeightFormat::kMxfp4:   return {8, false, true, false, 12};
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
    case WeightFormat::kInt4Zp:  return {8, false, true, true, 0};
    case WeightFormat::kQ5_0:    return {8, false, true, false, 16};
    case WeightFormat::kQ3K:     return {4, false, false, false, 4};
    case WeightFormat::kQ2K:     return {4, false, false, true, 0};
    case WeightFormat::kQ6K:     return {4, false, true, false, 32};
    default:                     return {8, false, true, false, 8};  // int4_g32, q4_0
  }
}

// Reads one format's panels as integer codes.
template <class V, class D, WeightFormat kFormat>
struct IntegerCodes {
  using F = typename V::F;
  using I = typename V::I;
  using Scale = GroupScale<V, kFormat>;
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  static constexpr CodeTraits kTraits = code_traits(kFormat);
  static constexpr bool kHasTable = kFormat == WeightFormat::kMxfp4 ||
                                    kFormat == WeightFormat::kIq4Nl ||
                                    kFormat == WeightFormat::kIq4Xs;
  static constexpr size_t kVectorBytes = 4 * V::kLanes;
  static constexpr size_t kWordBytes = 2 * kVectorBytes;  // one word of every output of a panel

  // The scale of a group for one half of the panel's outputs.
  [[gnu::always_inline]] static inline F scale(const uint8_t* record, uint32_t group, int half) {
    const F found = Scale::load(record, group, half);
    // The codes of e2m1 are doubled, so the scale is halved, which is exact.
    if constexpr (kFormat == WeightFormat::kMxfp4) return V::mul(found, V::set1(0.5f));
    return found;
  }

  // What an affine format adds to a group: 0 - offset.
  [[gnu::always_inline]] static inline F minus_offset(const uint8_t* record, uint32_t group,
                                                      int half) {
    return V::add(V::set1(0.0f), Scale::minus_offset(record, group, half));
  }

  struct Tables {
    typename D::ByteTable values;
  };
  [[gnu::always_inline]] static inline Tables tables() {
    if constexpr (kFormat == WeightFormat::kMxfp4)
      return {D::byte_table(kE2m1Codes)};
    else
      return {D::byte_table(kIq4Codes)};
  }

  // Calls body(step, half, codes) for all steps of one group and both halves of the panel, in the
  // order in which the words lie in memory. Inputs within steps have the order of kTraits.
  template <class Body>
  [[gnu::always_inline]] static inline void unfold(const Tables& tables, const uint8_t* record,
                                                   uint32_t group, const Body& body) {
    const uint8_t* at = Scale::Address::codes(record, group);
    if constexpr (kFormat == WeightFormat::kQ2K || kFormat == WeightFormat::kQ3K) {
      using Pairs = PairCodes<V, kFormat>;
      const Pairs codes[2] = {Pairs::load(at, 0), Pairs::load(at, 1)};
      const I mask = V::set1i(kFormat == WeightFormat::kQ3K ? 0x07070707 : 0x03030303);
#pragma GCC unroll 4
      for (uint32_t s = 0; s < 4; ++s) {
        body(s, 0u, D::both(codes[0].four(s), mask));
        body(s, 1u, D::both(codes[1].four(s), mask));
      }
    } else if constexpr (!kTraits.is_paired) {
#pragma GCC unroll 8
      for (uint32_t s = 0; s < 8; ++s) {
        body(s, 0u, D::as_signed_codes(V::load_words(at + s * kWordBytes)));
        body(s, 1u, D::as_signed_codes(V::load_words(at + s * kWordBytes + kVectorBytes)));
      }
    } else {
      I further[2] = {};
      // The word of further bits lies behind the words of nibbles, of which there are this many.
      constexpr size_t kFurther = has_fifth_bit(kFormat) ? 4 : 2;
      if constexpr (has_fifth_bit(kFormat) || kFormat == WeightFormat::kQ6K) {
        further[0] = V::load_words(at + kFurther * kWordBytes);
        further[1] = V::load_words(at + kFurther * kWordBytes + kVectorBytes);
      }
#pragma GCC unroll 4
      for (uint32_t w = 0; w < kTraits.steps / 2; ++w) {
#pragma GCC unroll 2
        for (uint32_t h = 0; h < 2; ++h) {
          const I words = V::load_words(at + w * kWordBytes + h * kVectorBytes);
          body(2 * w, h, code(tables, words, further[h], w, 0));
          body(2 * w + 1, h, code(tables, V::shift_right(words, 4), further[h], w, 1));
        }
      }
    }
  }

 private:
  // The codes of the low nibble of each byte. `part` is 0 where those are the even inputs of a word
  // and 1 where they are the odd ones.
  [[gnu::always_inline]] static inline I code(const Tables& tables, I nibbles, I further,
                                              uint32_t w, uint32_t part) {
    if constexpr (kFormat == WeightFormat::kQ6K) {
      const uint32_t from = 4 * w + 2 * part;  // where the upper bit pair lies; it belongs at bit 4
      const I upper =
          from < 4 ? V::shift_left(further, 4 - from) : V::shift_right(further, from - 4);
      return D::both(V::merge(V::set1i(0x0f0f0f0f), nibbles, upper), V::set1i(0x3f3f3f3f));
    }
    const I low = D::both(nibbles, V::set1i(0x0f0f0f0f));
    if constexpr (has_fifth_bit(kFormat)) return D::either(low, D::fifth_bits(further, w, part));
    if constexpr (kFormat == WeightFormat::kMxfp4) return D::look_up_bytes(tables.values, low);
    if constexpr (kHasTable) return D::as_signed_codes(D::look_up_bytes(tables.values, low));
    return low;
  }
};

}  // namespace dflash::compute
