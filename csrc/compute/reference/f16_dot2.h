// The arithmetic of numerics class f16-dot2 in words (docs/decisions/0019). Rows and weights are
// cut into groups of inputs; in a group both are f16 codes times a scale. Each class's rounding of
// a pair's products is the card's own: here they are added one after the other, one fma each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// A row: 32 inputs share a power of two, which brings the largest magnitude into [2^14, 2^15), or
// down to 2^-126 where that is not enough; code = x / scale rounded to f16, nearest even. NaN or
// infinity in a group gives it codes 0 and a NaN scale.
struct HalfCodes {
  std::vector<float> codes;   // [num_inputs], values of f16
  std::vector<float> scales;  // [ceil(num_inputs / 32)]
  // of a group's codes: of each four (0 + 1) + (2 + 3), then neighbours pair by pair
  std::vector<float> sums;
};
HalfCodes half_codes(const float* values, size_t num_inputs);

// A matrix: weight = code * scale of its group, less the group's offset where the format has one.
// Float formats have a row's scales and codes; integers and fp8, which f16 holds exactly, have
// their format's.
struct HalfWeights {
  uint32_t inputs = 0;
  uint32_t group_inputs = 32;  // 16 for q6_k
  std::vector<float> codes;    // [outputs, inputs]
  std::vector<float> scales;   // [outputs, groups]
  std::vector<float> offsets;  // [outputs, groups], q4_k and q5_k; else empty
  uint32_t num_groups() const { return (inputs + group_inputs - 1) / group_inputs; }
};
// What a layer that keeps `resident` computes with; the matrix passed check_resident().
HalfWeights half_weights(const MatrixView& matrix, WeightFormat resident);

// One output. Per group a chain of pairs from +0, ascending; per block of 256 inputs a chain from
// +0 over its groups, every step rounded once:
//   chain = fma(dot, weight scale * row scale, chain), then chain = fma(0 - offset, row scale *
//   (sum of the row's codes), chain) where
// there is an offset; block sums added in ascending order.
float f16_dot2(const HalfWeights& weights, size_t output, const HalfCodes& row);

}  // namespace dflash::compute
