// The sums of all classes, one fma at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/class_products.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "compute/formats/dequantize.h"
#include "compute/formats/value_checks.h"
#include "compute/reference/bf16_dot.h"

namespace dflash::compute {
namespace {

constexpr size_t kChain = 256;  // inputs per fma chain

// The sum of f32-canonical: chains of 256 fmas, added in ascending order. The classes of matrix
// units are summed so too, as the simulator does. An instruction adds 16 products in an order of
// its own, but the sums over 256 inputs are added as here.
float canonical_dot(const float* weights, const float* inputs, size_t num_inputs) {
  float total = 0.0f;
  for (size_t begin = 0; begin < num_inputs; begin += kChain) {
    float chain = 0.0f;
    for (size_t k = begin; k < std::min(begin + kChain, num_inputs); ++k)
      chain = std::fmaf(weights[k], inputs[k], chain);
    total = begin == 0 ? chain : total + chain;
  }
  return total;
}

// Returns how one output of floats is summed, in which some classes differ and in nothing else.
using FloatDot = float (*)(const float* weights, const float* inputs, size_t num_inputs);
FloatDot float_dot(NumericsClass numerics) {
  if (numerics == NumericsClass::kBf16Dot) return bf16_dot;
  if (numerics == NumericsClass::kBf16Bfdot) return bf16_bfdot;
  return canonical_dot;
}

}  // namespace

Result<ClassMatrix> class_matrix(const char* name, const MatrixView& view, WeightFormat resident,
                                 const NumericsFacts& facts) {
  DFLASH_TRY(check_resident(name, view, resident));
  DFLASH_TRY(check_values(name, view, resident, 0, view.outputs));
  if (facts.inputs == InputRounding::kInt8)
    return ClassMatrix{{}, integer_weights(view, resident), {}, view.inputs};
  if (facts.weights == WeightRounding::kF16)
    return ClassMatrix{{}, {}, half_weights(view, resident), view.inputs};
  ClassMatrix matrix{std::vector<float>(size_t{view.outputs} * view.inputs), {}, {}, view.inputs};
  dequantize(view, 0, view.outputs, matrix.values.data());
  if (!format_facts(resident).is_stored) {
    for (uint32_t o = 0; o < view.outputs; ++o)
      requantize_row(resident, &matrix.values[o * matrix.inputs], view.inputs);
  }
  if (facts.weights == WeightRounding::kBf16)
    round_to_bf16(matrix.values.data(), matrix.values.size());
  return matrix;
}

ClassRow class_row(const NumericsFacts& facts, std::vector<float> values) {
  switch (facts.inputs) {
    case InputRounding::kNone: break;
    case InputRounding::kBf16: round_to_bf16(values.data(), values.size()); break;
    case InputRounding::kInt8: return {{}, int8_codes(values.data(), values.size()), {}};
    case InputRounding::kF16:  return {{}, {}, half_codes(values.data(), values.size())};
  }
  return {std::move(values), {}, {}};
}

float class_dot(const NumericsFacts& facts, const ClassMatrix& matrix, size_t output,
                const ClassRow& row) {
  if (facts.inputs == InputRounding::kInt8) return int8_dot(matrix.integers, output, row.integers);
  if (facts.inputs == InputRounding::kF16) return f16_dot2(matrix.halves, output, row.halves);
  const float* weights = matrix.values.data() + output * matrix.inputs;
  return float_dot(facts.numerics)(weights, row.values.data(), matrix.inputs);
}

}  // namespace dflash::compute
