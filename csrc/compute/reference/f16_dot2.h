// The arithmetic of numerics class f16-dot2 in words (docs/decisions/0019). Rows and weights are
// cut into groups of inputs, and in a group both are f16 codes times a scale. How a pair's products
// are rounded is each card's own; here they are added one after the other, one fma each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// A row: 32 inputs share a power of two, which brings the largest magnitude into [2^14, 2^15) but
// is at least 2^-126. A code is x / scale rounded to f16, nearest even. A group with NaN or
// infinity has codes 0 and a NaN scale.
struct HalfCodes {
  std::vector<float> codes;   // [num_inputs], values of f16
  std::vector<float> scales;  // [ceil(num_inputs / 32)]
  // [ceil(num_inputs / 32)], the sum of a group's codes: neighbours are added pair by pair, then
  // their sums, and so on.
  std::vector<float> sums;
};
HalfCodes half_codes(const float* values, size_t num_inputs);

// A matrix: a weight is code * scale of its group, less the group's offset where the format has
// one. Float formats have codes and scales as a row has; integers and fp8, which f16 holds exactly,
// keep those of their format.
struct HalfWeights {
  uint32_t inputs = 0;
  uint32_t group_inputs = 32;  // 16 for q6_k
  std::vector<float> codes;    // [outputs, inputs]
  std::vector<float> scales;   // [outputs, groups]
  std::vector<float> offsets;  // [outputs, groups] where is_affine(), otherwise empty
  uint32_t num_groups() const { return (inputs + group_inputs - 1) / group_inputs; }
};
// Makes what a layer that keeps `resident` computes with; the matrix has passed check_resident().
HalfWeights half_weights(const MatrixView& matrix, WeightFormat resident);

// One output. A group is a chain over ascending pairs from +0. A block of 256 inputs is a chain
// from +0 over its groups, in which every step is rounded once:
//   chain = fma(dot, weight scale * row scale, chain)
//   chain = fma(0 - offset, row scale * (sum of the row's codes), chain), if there is an offset
// The sums of blocks are added in ascending order.
float f16_dot2(const HalfWeights& weights, size_t output, const HalfCodes& row);

}  // namespace dflash::compute
