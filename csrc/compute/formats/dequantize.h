// What the bits of each weight format mean: the readable twin of every kernel that dequantises, and
// what the reference computes with. Each product and each difference below is one IEEE float32
// operation, rounded once.
//
//   int8_g32, int4_g32   q * scale            q = clamp(rint(w / scale)), scale = amax / 127 or / 7
//   over 32 inputs (0 for zeros) fp8_e4m3_b128        v(code) * scale mxfp4, gguf_mxfp4 e2m1(code)
//   * 2^(b - 127)        iq4_nl   level(code) * d q8_0                 q * d iq4_xs   (d * (scale -
//   32)) * level(code) q4_0                 (code - 8) * d                  q6_k     (d * scale) *
//   (code - 32) + 0 q4_k, q5_k           (d * scale) * code - (dmin * minimum)
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/dequantize_tables.h"
#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Values [first_output, first_output + num_outputs) x all inputs of a matrix in any stored format.
// `values` [num_outputs, inputs].
void dequantize(const MatrixView& matrix, uint32_t first_output, uint32_t num_outputs,
                float* values);

// A bias as float32 [count, padded with zeros to padded_count]; empty if absent.
std::vector<float> widen_vector(const VectorView& vector, uint32_t padded_count);

// One group of 32 inputs quantised at load: `limit` is 127 or 7. Writes integers in [-limit, limit]
// and returns the scale.
float quantize_group(const float* values, float limit, int8_t* integers);

// What a layer that keeps `format` (int8_g32, int4_g32) computes with instead of a row of `count`
// values. In place.
void requantize_row(WeightFormat format, float* values, uint32_t count);

// 2^(exponent - 127); 255 is NaN.
float e8m0_to_f32(uint8_t exponent);
// Finite-only e4m3: 0x7f and 0xff are NaN.
float e4m3_to_f32(uint8_t code);

// The rows of one family of formats; private to dequantize.cc and its files.
namespace internal {
// q8_0 q4_0 iq4_nl gguf_mxfp4
void dequantize_block_32(WeightFormat format, const uint8_t* block, float* values);
// q4_k q5_k q6_k iq4_xs
void dequantize_block_256(WeightFormat format, const uint8_t* block, float* values);
uint16_t load_u16(const uint8_t* bytes);
// The six-bit scale and minimum of group 0..7 out of the 12 bytes of q4_k and q5_k.
void k_scale(const uint8_t* packed, uint32_t group, uint8_t* scale, uint8_t* minimum);
}  // namespace internal

}  // namespace dflash::compute
