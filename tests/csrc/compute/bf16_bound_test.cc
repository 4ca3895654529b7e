// bf16-dot and bf16-bfdot are within a derived bound of float64, and as far from it as rounding to
// bf16 is.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>

#include "base/dtype.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;

// |W| |x|.
std::vector<double> absolute_product(const MatrixView& matrix, const std::vector<double>& input) {
  std::vector<double> output(matrix.outputs, 0.0);
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    for (uint32_t i = 0; i < matrix.inputs; ++i) {
      uint16_t bits;
      std::memcpy(&bits, matrix.data + 2 * (size_t{o} * matrix.inputs + i), 2);
      output[o] += std::fabs(static_cast<double>(bf16_to_f32(bits))) * std::fabs(input[i]);
    }
  }
  return output;
}

// How far one expert's outputs can lie from the exact ones. A bf16 (8 significant bits) is within r
// = 2^-8 of its value, and a product of n inputs within n u of the sum of magnitudes (Higham,
// section 3.1; one more u per block); `step` is u, 2^-24 where sums are rounded to nearest and
// 2^-23 to odd. With |silu'| <= 1.1 and |silu(x)| <= |x|, h = silu(g) * u moves by at most 1.1 dg
// (|u| + du) + |g| du.
std::vector<double> error_bound(const ExpertWeights& weights, const std::vector<double>& row,
                                double step) {
  constexpr double kRounding = 0x1p-8;
  const auto of_sum = [step](size_t count) {
    return kRounding + static_cast<double>(count + count / 256 + 2) * step * (1 + kRounding);
  };
  const std::vector<double> g = absolute_product(weights.gate, row),
                            u = absolute_product(weights.up, row);
  std::vector<double> magnitude(g.size()), error(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    const double dg = of_sum(row.size()) * g[i], du = of_sum(row.size()) * u[i];
    magnitude[i] = g[i] * u[i];
    // 16 steps: the activation's own
    error[i] = (1.1 * dg * (u[i] + du) + g[i] * du + 16 * step * magnitude[i]) * (1 + kRounding);
  }
  const std::vector<double> moved = absolute_product(weights.down, error),
                            sums = absolute_product(weights.down, magnitude);
  std::vector<double> bound(sums.size());
  for (size_t o = 0; o < bound.size(); ++o)
    bound[o] = moved[o] + of_sum(error.size()) * (sums[o] + moved[o]);
  return bound;
}

void check_class(NumericsClass numerics, Isa isa, double step) {
  const FfnSpec spec = toy::spec_of(512, 256, 200);
  const Experts experts(spec, 1, Dtype::kBF16, 61);
  const Batch batch = Batch::of_one_expert(spec, 24, 0, 62, 1.0f);
  const auto layer = toy::layer_of(isa_is_supported(isa) ? isa : Isa::kReference, spec, 1,
                                   WeightFormat::kBF16, numerics);
  REQUIRE(experts.load_into(*layer).ok());
  const std::vector<std::byte> reply = reply_of(*layer, batch);
  const std::vector<std::byte> encoded = toy::encode(batch.row_dtype, batch.rows);
  std::vector<std::byte> unused(reply.size());
  const std::vector<double> exact =
      forward_float64(spec, experts.all_weights(), batch.args(encoded, unused));
  double power = 0, error_power = 0;
  for (uint32_t r = 0; r < 24; ++r) {
    const std::vector<double> row(batch.rows.begin() + r * 512, batch.rows.begin() + (r + 1) * 512);
    const std::vector<double> bound = error_bound(experts.weights(0), row, step);
    for (uint32_t o = 0; o < 200; ++o) {
      float found;
      std::memcpy(&found, reply.data() + 4 * (r * 200 + o), 4);
      const double error = static_cast<double>(found) - exact[r * 200 + o];
      REQUIRE(std::fabs(error) <= bound[o]);
      power += exact[r * 200 + o] * exact[r * 200 + o];
      error_power += error * error;
    }
  }
  // Three roundings of at most 2^-8 (row into g and u, h) add up as random ones do: at most sqrt(3)
  // * 2^-8 / sqrt(3) of the deviation.
  const double relative = std::sqrt(error_power / power);
  CHECK(relative <= 0x1p-8);
  CHECK(relative >= 0x1p-12);  // rows and intermediate rows really are rounded to bf16
}

TEST_CASE(
    "bf16-dot is within the derived bound of float64, and as near as rounding to bf16 allows") {
  check_class(NumericsClass::kBf16Dot, Isa::kAvx512Bf16, 0x1p-24);
}

TEST_CASE(
    "bf16-bfdot is within the derived bound of float64, and as near as rounding to bf16 allows") {
  check_class(NumericsClass::kBf16Bfdot, Isa::kNeonBf16, 0x1p-23);
}

}  // namespace
}  // namespace dflash::compute
