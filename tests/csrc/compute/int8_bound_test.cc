// int8-groups is within the derived bound of float64 in every format it takes, and as far from it
// as rounding rows to int8 is.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>

#include "compute/formats/dequantize.h"
#include "compute/reference/int8_groups.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::StoredExperts;

constexpr uint32_t kIn = 512, kMid = 256, kOut = 40, kRows = 12;
constexpr double kStep = 0x1p-24;

// A matrix as the layer keeps it, [outputs, inputs]: weights as f32-canonical has them, and
// magnitudes of the terms the class adds instead (a code times its scale, and the offset, which
// together are larger than the weight).
struct Matrix {
  uint32_t outputs, inputs;
  std::vector<float> weights;
  std::vector<double> terms;
};

Matrix read(const MatrixView& view, WeightFormat resident) {
  Matrix matrix{
      view.outputs, view.inputs, std::vector<float>(size_t{view.outputs} * view.inputs), {}};
  dequantize(view, 0, view.outputs, matrix.weights.data());
  if (!format_facts(resident).is_stored) {
    for (uint32_t o = 0; o < view.outputs; ++o)
      requantize_row(resident, &matrix.weights[size_t{o} * view.inputs], view.inputs);
  }
  const IntegerWeights integers = integer_weights(view, resident);
  for (size_t at = 0; at < matrix.weights.size(); ++at) {
    const size_t group =
        at / view.inputs * integers.num_groups() + at % view.inputs / integers.group_inputs;
    const double offset =
        integers.offsets.empty() ? 0.0 : std::fabs(static_cast<double>(integers.offsets[group]));
    matrix.terms.push_back(std::abs(integers.codes[at]) *
                               std::fabs(static_cast<double>(integers.scales[group])) +
                           offset);
  }
  return matrix;
}

struct Values {
  std::vector<double> exact, error;  // error: at most this far from exact
};

// What one product adds to the error. A code is within half a step of its input, and a little more:
// quotient and scale round once each (127 * 2^-24 and 2^-24), so that the input as the class has it
// lies within largest / 254 * (1 + 2^-15). The sum takes at most two roundings per group of 16
// inputs (fma, product of scales), two more where there is an offset, one per block; a weight of
// f32-canonical three.
Values product(const Matrix& matrix, const Values& input) {
  // |x| at most; how far x may have moved
  std::vector<double> reach(matrix.inputs), moved(matrix.inputs);
  for (uint32_t begin = 0; begin < matrix.inputs; begin += 32) {
    double largest = 0;
    for (uint32_t i = begin; i < begin + 32; ++i)
      largest = std::max(largest, std::fabs(input.exact[i]) + input.error[i]);
    for (uint32_t i = begin; i < begin + 32; ++i) {
      moved[i] = input.error[i] + largest / 254 * (1 + 0x1p-15);
      reach[i] = std::fabs(input.exact[i]) + moved[i];
    }
  }
  const double roundings = 4.0 * (matrix.inputs / 16) + matrix.inputs / 256 + 3;
  Values found{std::vector<double>(matrix.outputs), std::vector<double>(matrix.outputs)};
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    for (uint32_t i = 0; i < matrix.inputs; ++i) {
      const size_t at = size_t{o} * matrix.inputs + i;
      found.exact[o] += static_cast<double>(matrix.weights[at]) * input.exact[i];
      found.error[o] += std::fabs(static_cast<double>(matrix.weights[at])) * moved[i] +
                        roundings * kStep * matrix.terms[at] * reach[i];
    }
  }
  return found;
}

TEST_CASE(
    "int8-groups: every format is within the derived bound of float64, and as near as rounding to "
    "int8 allows") {
  FfnSpec spec = toy::spec_of(kIn, kMid, kOut);  // two products and nothing between them
  spec.gate = GateKind::kNone, spec.activation = Activation::kIdentity;
  uint32_t seed = 70;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto resident = static_cast<WeightFormat>(value);
    if (!numerics_facts(NumericsClass::kInt8Groups).takes(resident)) continue;
    CAPTURE(format_name(resident));
    const WeightFormat stored = toy::source_of(resident);
    const StoredExperts experts(spec, 1, stored, stored, ++seed);
    ExpertWeights weights = experts.weights(0);
    weights.gate = {};
    const auto layer = toy::layer_of(best_isa(), spec, 1, resident, NumericsClass::kInt8Groups);
    YieldingProgress progress{0};
    REQUIRE(layer->load_expert(0, weights, progress).ok());
    Batch batch = Batch::of_one_expert(spec, kRows, 0, seed, 1.0f);
    // outliers: steps that differ from group to group
    for (size_t i = 0; i < batch.rows.size(); i += 97) batch.rows[i] *= 20;
    const std::vector<std::byte> reply = reply_of(*layer, batch);
    const Matrix up = read(weights.up, resident), down = read(weights.down, resident);
    double power = 0, error_power = 0;
    for (uint32_t r = 0; r < kRows; ++r) {
      const std::vector<double> row(batch.rows.begin() + r * kIn,
                                    batch.rows.begin() + (r + 1) * kIn);
      const Values expected = product(down, product(up, {row, std::vector<double>(kIn, 0.0)}));
      for (uint32_t o = 0; o < kOut; ++o) {
        float found;
        std::memcpy(&found, reply.data() + 4 * (size_t{r} * kOut + o), 4);
        const double error = static_cast<double>(found) - expected.exact[o];
        REQUIRE(std::fabs(error) <= expected.error[o]);
        power += expected.exact[o] * expected.exact[o];
        error_power += error * error;
      }
    }
    // A group of 32 normal values has a largest of 2 to 4 deviations, an outlier's of 20 and more:
    // steps of 1/64 to 1/3 of a deviation, a third of that as the rounding error.
    const double relative = std::sqrt(error_power / power);
    CHECK(relative <= 0x1p-4);
    CHECK(relative >= 0x1p-9);  // rows and intermediate rows really are rounded to int8
  }
}

}  // namespace
}  // namespace dflash::compute
