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
//   q4_1, q5_1          d * code + m
//   q5_0                (code - 16) * d
//   iq3_xxs             (d * (0.5 + scale) * 0.5) * entry(index)[i] * sign
//   iq3_s               (d * (1 + 2 * scale)) * entry(index)[i] * sign
//   iq2_xxs/_xs/_s      (d * (0.5 + scale) * 0.25) * entry(index)[i] * sign
//   iq1_s, iq1_m        (d * (2 * scale + 1)) * (entry(index)[i] + delta), delta = +-0.125
//   tq1_0, tq2_0        d * (code - 1)
//   nvfp4               e4m3(scale) / 2 * (2 * e2m1(code)), without a negative zero
//   q3_k                (d * (scale - 32)) * (code - 4)
//   q2_k                (d * scale) * code - (dmin * minimum)
//   int4_zp             scale * code - scale * zero, which is (code - zero) * scale exactly
//
// In the formats with grids (grid_table.h) scale is an integer in 0..15, and the products that make
// the factor of a group are exact.
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/grid_table.h"
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
// The two halves of the first word of a block of int4_zp.
float int4_scale(uint32_t word);
inline float int4_zero(uint32_t word) { return static_cast<float>(word & 31u); }

// The blocks of formats without scales apart: private to dequantize.cc and the reference of
// int8-groups.
namespace internal {
// For q8_0, q4_0, q4_1, q5_0, q5_1, iq4_nl, gguf_mxfp4 and int4_zp.
void dequantize_block_32(WeightFormat format, const uint8_t* block, float* values);
// For q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs and the formats with grids.
void dequantize_block_256(WeightFormat format, const uint8_t* block, float* values);
uint16_t load_u16(const uint8_t* bytes);
uint32_t load_u32(const uint8_t* bytes);
// Extracts the six-bit scale and minimum of group 0..7 from the 12 bytes of q4_k and q5_k.
void k_scale(const uint8_t* packed, uint32_t group, uint8_t* scale, uint8_t* minimum);
// Extracts the six-bit scale of group 0..15 from the 12 bytes of q3_k.
uint32_t q3_k_scale(const uint8_t* packed, uint32_t group);

// A block of a format with a grid, taken apart (grid_blocks.cc). An octet is eight inputs.
struct GridBlock {
  uint16_t d;            // f16
  uint8_t scales[16];    // 0..15, of 16 inputs each; in iq3_* and iq2_xxs two are equal
  uint16_t indices[64];  // of entries, ascending: one for four inputs in iq3_*, else for eight
  uint8_t signs[32];     // of octets; bit i is set where input i is negative
};
GridBlock open_grid_block(WeightFormat format, const uint8_t* block);
// The magnitude of input 0..255.
uint8_t grid_magnitude(WeightFormat format, const GridBlock& block, uint32_t input);
// The float32 by which the magnitudes of inputs [16 * sixteen, 16 * sixteen + 16) are multiplied.
float grid_factor(WeightFormat format, const GridBlock& block, uint32_t sixteen);
void dequantize_grid_block(WeightFormat format, const uint8_t* block, float* values);

// For the formats without panels (mapped_blocks.cc).
void dequantize_mapped_block(WeightFormat format, const uint8_t* block, float* values);
// The f16 of a block of iq1_m, which lies in four parts.
uint16_t iq1_m_scale(const uint8_t* block);
// Half of an unsigned e4m3, of which 0x7f means zero; bit 7 means nothing.
float nvfp4_scale(uint8_t code);
}  // namespace internal

}  // namespace dflash::compute
