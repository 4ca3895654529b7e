// The resident layout of quantised weights, in panels of `width` outputs. Inputs come in records (a
// GGUF super-block, an FP8 square, one group); a record is a header and its groups, every field an
// array over the panel's outputs, so that one output is one lane.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/formats/weight_format.h"

namespace dflash::compute {

//   format               header          group: scales          codes further bits int8_g32 - f32
//   8 words of 4 bytes int4_g32             -               f32                    4 words of 8
//   nibbles (code = q + 8) q8_0                 -               f16                    8 words
//   q4_0, iq4_nl         -               f16                    4 words
//   mxfp4 (both)         -               u8 exponent            4 words
//   q4_k                 f16 d, dmin     u8 scale, minimum      4 words
//   q5_k                 f16 d, dmin     u8 scale, minimum      4 words                          1
//   word: fifth bits q6_k (groups of 16)  f16 d           i8                     2 words 1 word:
//   upper bit pairs iq4_xs               f16 d           i8 scale - 32          4 words fp8 (groups
//   of 128)  -               f32                    128 bytes, [input][output]
//
// Upper bit pairs of q6_k: that of input 8w + 2b + p lies in byte b at bits 4w + 2p, so that all
// four of (w, p) stand where a shift by 4p puts the nibbles of word w: four whole codes, one a
// byte.
//
// A word is a little-endian uint32 of one output, ascending inputs from its lowest bits. Bytes are
// those of the stored format, but for six-bit scales that take a whole byte (q4_k and q5_k 3 %
// larger, iq4_xs 1.5 %) and FP8's scale per output (3 %).
struct PanelLayout {
  uint32_t record_inputs;
  uint32_t group_inputs;
  uint32_t header_bytes;  // per output
  uint32_t scale_bytes;   // per output and group
  uint32_t code_bytes;    // per output and group, further bits included

  constexpr size_t group_bytes() const { return size_t{scale_bytes} + code_bytes; }
  // per output
  constexpr size_t record_bytes() const {
    return header_bytes + record_inputs / group_inputs * group_bytes();
  }
};

// Of a quantised format.
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
    default:                         return {1, 1, 0, 0, 0};
  }
}

}  // namespace dflash::compute
