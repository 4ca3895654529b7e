// The arithmetic of numerics class int8-groups in words. Rows and weights are cut into groups of
// inputs. In a group both are small integers times a scale, and the sum of their products is exact.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// A row: 32 inputs share a scale, their largest magnitude / 127. A code is x / scale, rounded half
// to even and at most 127. A scale of zero has codes 0; a group with NaN or infinity has codes 0
// and a NaN scale.
struct Int8Codes {
  std::vector<int32_t> codes;  // [num_inputs]
  std::vector<float> scales;   // [ceil(num_inputs / 32)]
};
Int8Codes int8_codes(const float* values, size_t num_inputs);

// A matrix: a weight is code * scale of its group, less the group's offset where the format has
// one.
struct IntegerWeights {
  uint32_t inputs = 0;
  uint32_t group_inputs = 32;  // 16 for q6_k, q3_k, q2_k, iq2_xs and iq2_s
  std::vector<int32_t> codes;  // [outputs, inputs]
  std::vector<float> scales;   // [outputs, groups]
  std::vector<float> offsets;  // [outputs, groups] where is_affine(), otherwise empty
  uint32_t num_groups() const { return (inputs + group_inputs - 1) / group_inputs; }
};
// Makes what a layer that keeps `resident` holds of a matrix. The class takes the format, and the
// matrix has passed check_resident().
IntegerWeights integer_weights(const MatrixView& matrix, WeightFormat resident);

// One output. A block of 256 inputs is a chain from +0 over its groups in ascending order, in which
// every step is rounded once:
//   chain = fma(dot, weight scale * row scale, chain)
//   chain = fma(0 - offset, row scale * (sum of the row's codes), chain), if there is an offset
// The sums of blocks are added in ascending order.
float int8_dot(const IntegerWeights& weights, size_t output, const Int8Codes& row);

}  // namespace dflash::compute
