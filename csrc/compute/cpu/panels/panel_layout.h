// The resident layout of quantised weights, in panels of `width` outputs. The inputs of a panel
// come in records: a GGUF super-block, an FP8 square or one group. A record is a header and its
// groups, and each field is an array over the panel's outputs, so that one output is one lane of a
// vector.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/formats/weight_format.h"

namespace dflash::compute {

//   format               header        per group: scales      codes     further bits
//   int8_g32             -             f32                    8 words (one code a byte)
//   int4_g32             -             f32                    4 words of 8 nibbles (code = q + 8)
//   q8_0                 -             f16                    8 words
//   q4_0, iq4_nl         -             f16                    4 words
//   mxfp4, gguf_mxfp4    -             u8 exponent            4 words
//   q4_k                 f16 d, dmin   u8 scale, u8 minimum   4 words
//   q5_k                 f16 d, dmin   u8 scale, u8 minimum   4 words   1 word: the fifth bits
//   q6_k (groups of 16)  f16 d         i8 scale               2 words   1 word: the upper bit pairs
//   iq4_xs               f16 d         i8 scale - 32          4 words
//   q4_1                 -             f16 d, f16 m           4 words
//   q5_0                 -             f16                    4 words   1 word: the fifth bits
//   q5_1                 -             f16 d, f16 m           4 words   1 word: the fifth bits
//   q3_k (groups of 16)  f16 d         i8 scale - 32          1 word    u16: the third bits
//   q2_k (groups of 16)  f16 d, dmin   u8 scale and minimum   1 word
//   int4_zp              -             f32 | u5 zero point    4 words
//   fp8 (groups of 128)  -             f32                    128 bytes, [input][output]
//   iq3_xxs              f16 d         -                      2 words of indices, signs
//   iq3_s                f16 d         u8 1 + 2 * scale, u8   2 words of indices, signs
//   iq2_xxs              f16 d         -                      1 word of indices, signs
//   iq2_xs               f16 d         u8 two scales          1 word of indices, signs
//   iq2_s                f16 d         u8 two scales, u8      1 word of indices, signs
//
// A word is a little-endian uint32 of one output and holds ascending inputs from its lowest bits
// on. In q6_k, the upper bit pair of input 8w + 2b + p lies in byte b at bits 4w + 2p: the shift by
// 4p that brings up the nibbles of word w then aligns all four pairs of (w, p) with them, and four
// whole codes result, one a byte.
//
// The formats with grids keep indices, a byte of a word each, and look entries up as they compute
// (grid_table.h). The word of signs has that of input 8o + 4h + b (o, b < 4, h < 2) in bit
// 8b + 4h + o: the shift by 4h + o then aligns the signs of four inputs with their bytes. Where the
// last sign of an octet follows from the seven others, bits 28..31 are free: they hold the scale in
// iq3_xxs and iq2_xxs, and the ninth bits of the indices in iq2_xs. The last byte of iq3_s has the
// ninth bits, that of iq2_s the ninth and tenth. Two scales in a byte are of 16 inputs each.
//
// In q2_k and q3_k, the bit pair of input 4s + b lies in byte b at bits 2s: a shift by 2s brings up
// four codes, one a byte. The third bit of that input is bit 8(b % 2) + 4(b / 2) + s; the sixteen
// and a copy of them 12 bits higher have, in the lower half of byte b, the third bits of inputs b,
// 4 + b, 8 + b and 12 + b. The scale of q2_k is the low nibble of its byte.
//
// A panel takes as many bytes as the stored format, with two exceptions: scales of four or six bits
// get a whole byte where they are not in free bits (q3_k grows by 4 %, q4_k and q5_k by 3 %, iq4_xs
// by 1.5 %, iq3_s by 3.6 %), and FP8 has its scale once per output (3 %).
struct PanelLayout {
  uint32_t record_inputs;
  uint32_t group_inputs;
  // Sizes below are those of one output; a panel takes `width` times as much.
  uint32_t header_bytes;  // of a record
  uint32_t scale_bytes;   // of a group
  uint32_t code_bytes;    // of a group, its further bits included

  constexpr size_t group_bytes() const { return size_t{scale_bytes} + code_bytes; }
  constexpr size_t record_bytes() const {
    return header_bytes + record_inputs / group_inputs * group_bytes();
  }
};

// Whether the codes are nibbles with a word of fifth bits behind them, of which bit i is input i's.
constexpr bool has_fifth_bit(WeightFormat format) {
  return format == WeightFormat::kQ5K || format == WeightFormat::kQ5_0 ||
         format == WeightFormat::kQ5_1;
}

// The layout of a quantised format. Float formats have no records; they get an empty layout.
constexpr PanelLayout panel_layout(WeightFormat format) {
  switch (format) {
    case WeightFormat::kInt8G32:     return {32, 32, 0, 4, 32};
    case WeightFormat::kInt4G32:     return {32, 32, 0, 4, 16};
    case WeightFormat::kQ8_0:        return {32, 32, 0, 2, 32};
    case WeightFormat::kQ4_0:
    case WeightFormat::kIq4Nl:       return {32, 32, 0, 2, 16};
    case WeightFormat::kMxfp4:
    case WeightFormat::kGgufMxfp4:   return {32, 32, 0, 1, 16};
    case WeightFormat::kQ4K:         return {256, 32, 4, 2, 16};
    case WeightFormat::kQ5K:         return {256, 32, 4, 2, 20};
    case WeightFormat::kQ6K:         return {256, 16, 2, 1, 12};
    case WeightFormat::kIq4Xs:       return {256, 32, 2, 1, 16};
    case WeightFormat::kFp8E4m3B128: return {128, 128, 0, 4, 128};
    case WeightFormat::kQ4_1:        return {32, 32, 0, 4, 16};
    case WeightFormat::kQ5_0:        return {32, 32, 0, 2, 20};
    case WeightFormat::kQ5_1:        return {32, 32, 0, 4, 20};
    case WeightFormat::kIq3Xxs:      return {256, 32, 2, 0, 12};
    case WeightFormat::kIq3S:        return {256, 32, 2, 2, 12};
    case WeightFormat::kIq2Xxs:      return {256, 32, 2, 0, 8};
    case WeightFormat::kIq2Xs:       return {256, 32, 2, 1, 8};
    case WeightFormat::kIq2S:        return {256, 32, 2, 2, 8};
    case WeightFormat::kQ3K:         return {256, 16, 2, 1, 6};
    case WeightFormat::kQ2K:         return {256, 16, 4, 1, 4};
    case WeightFormat::kInt4Zp:      return {32, 32, 0, 4, 16};
    default:                         return {1, 1, 0, 0, 0};
  }
}

}  // namespace dflash::compute
