// What the bits of each weight format mean. This is the readable twin of every kernel that
// dequantises, and what the reference computes with. Each product and each difference below is one
// IEEE float32 operation, rounded once.
//
//   int8_g32, int4_g32  q * scale; q = clamp(rint(w / scale)), and scale = amax / 127 or amax / 7
//                       over 32 inputs (0 where all are zero)
//   fp8_e4m3_b128       v(code) * scale
//   mxfp4, gguf_mxfp4   e2m1(code) * 2^(b - 127)
//   q8_0                q * d
//   q4_0                (code - 8) * d
//   q4_k, q5_k          (d * scale) * code - (dmin * minimum)
//   q6_k                (d * scale) * (code - 32) + 0
//   iq4_nl              level(code) * d
//   iq4_xs              (d * (scale - 32)) * level(code)
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/dequantize_tables.h"
#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Writes outputs [first_output, first_output + num_outputs) of a matrix in any stored format to
// `values` [num_outputs, inputs].
void dequantize(const MatrixView& matrix, uint32_t first_output, uint32_t num_outputs,
                float* values);

// Returns a bias as float32, padded with zeros to padded_count; empty where there is none.
std::vector<float> widen_vector(const VectorView& vector, uint32_t padded_count);

// Quantises one group of 32 inputs at load. `limit` is 127 or 7; the integers lie in
// [-limit, limit]. Returns the scale.
float quantize_group(const float* values, float limit, int8_t* integers);

// Replaces a row of `count` values by those that a layer which keeps int8_g32 or int4_g32 computes
// with.
void requantize_row(WeightFormat format, float* values, uint32_t count);

// 2^(exponent - 127); 255 means NaN.
float e8m0_to_f32(uint8_t exponent);
// The finite-only e4m3, whose 0x7f and 0xff mean NaN.
float e4m3_to_f32(uint8_t code);

// The blocks of the GGUF formats: private to dequantize.cc and the reference of int8-groups.
namespace internal {
// For q8_0, q4_0, iq4_nl and gguf_mxfp4.
void dequantize_block_32(WeightFormat format, const uint8_t* block, float* values);
// For q4_k, q5_k, q6_k and iq4_xs.
void dequantize_block_256(WeightFormat format, const uint8_t* block, float* values);
uint16_t load_u16(const uint8_t* bytes);
// Extracts the six-bit scale and minimum of group 0..7 from the 12 bytes of q4_k and q5_k.
void k_scale(const uint8_t* packed, uint32_t group, uint8_t* scale, uint8_t* minimum);
}  // namespace internal

}  // namespace dflash::compute
