// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/matrix_bounds.h"

#include <algorithm>
#include <cmath>

#include "base/convert.h"
#include "compute/dequantize.h"
#include "compute/layer_checks.h"
#include "compute/reference/bf16_dot.h"
#include "compute/reference/reference.h"

namespace dflash::compute {
namespace {

// Values known up to an error: each is within errors[i] of centers[i].
struct Enclosed {
  std::vector<double> centers, errors;
};

std::vector<float> halves_of(const MatrixView& view, WeightFormat resident) {
  std::vector<float> values(size_t{view.outputs} * view.inputs);
  dequantize(view, 0, view.outputs, values.data());
  if (!format_facts(resident).is_stored) {
    for (uint32_t o = 0; o < view.outputs; ++o) requantize_row(resident, &values[size_t{o} * view.inputs], view.inputs);
  }
  round_to_bf16(values.data(), values.size());
  return values;
}

// A product of n exact terms. An instruction aligns 16 products and the sum so far to the largest of them and cuts each at the 24th bit or
// below, then normalises: 17 errors of 2^-23 of the sum of magnitudes at most, and one more rounding. A chain of 256 is added with one rounding, a
// bias with another. Units that flush subnormals (gfx908, gfx90a) lose up to 2^-126 of the other factor per term.
Enclosed product(const MatrixView& view, WeightFormat resident, const VectorView& bias, const Enclosed& inputs) {
  const std::vector<float> weights = halves_of(view, resident), biases = widen_vector(bias, view.outputs);
  const double n = view.inputs, steps = std::ceil(n / 16);
  const double relative = (17 * steps + steps + std::ceil(n / 256) + 2) * 0x1p-23;
  Enclosed found{std::vector<double>(view.outputs), std::vector<double>(view.outputs)};
  for (uint32_t o = 0; o < view.outputs; ++o) {
    double sum = biases.empty() ? 0.0 : static_cast<double>(biases[o]), magnitude = std::fabs(sum), moved = 0.0, largest = 1.0;
    for (uint32_t k = 0; k < view.inputs; ++k) {
      const double weight = static_cast<double>(weights[size_t{o} * view.inputs + k]);
      sum += weight * inputs.centers[k];
      moved += std::fabs(weight) * inputs.errors[k];
      magnitude += std::fabs(weight) * (std::fabs(inputs.centers[k]) + inputs.errors[k]);
      largest = std::max({largest, std::fabs(weight), std::fabs(inputs.centers[k])});
    }
    found.centers[o] = sum;
    found.errors[o] = moved + relative * magnitude + 3 * n * largest * 0x1p-126;
  }
  return found;
}

// The steepest slope of an activation over |x| <= reach.
double steepest(Activation activation, double reach) {
  switch (activation) {
    case Activation::kRelu:
    case Activation::kIdentity: return 1.0;
    case Activation::kReluSquared: return 2 * reach;
    case Activation::kSigmoid: return 0.25;
    case Activation::kSilu:
    case Activation::kQuickGelu: return 1.1;  // 1.0998 at x = 2.4, whatever the factor inside
    case Activation::kGelu:
    case Activation::kGeluTanh: return 1.13;  // 1.1289 at x = sqrt(2)
  }
  return INFINITY;
}

// An intermediate value and its error, before it is rounded to bf16. `kStep`: the float32 operations of an activation, at most eight.
void enclose_gate(const FfnSpec& spec, double g, double g_error, double u, double u_error, double& center, double& error) {
  constexpr double kStep = 0x1p-20;
  center = gate_float64(spec, g, u);
  if (spec.gate == GateKind::kNone) {
    const double reach = std::fabs(u) + u_error;
    error = steepest(spec.activation, reach) * u_error + kStep * (reach + std::fabs(center));
    return;
  }
  const bool is_plain = spec.gate == GateKind::kGated;
  const double slope = is_plain ? steepest(spec.activation, std::fabs(g) + g_error) : 1.1;  // g * sigmoid(alpha * g)
  const double offset = is_plain ? 0.0 : std::fabs(static_cast<double>(spec.up_offset));
  const double factor = std::min(std::fabs(u), static_cast<double>(spec.up_limit)) + u_error + offset;
  const double reach = std::fabs(g) + g_error;
  const double activated = std::max(reach * std::max(slope, 1.0), 1.0);  // |a(g)| <= that: every activation is below its slope times |g|, or 1
  error = slope * g_error * factor + activated * u_error + kStep * (activated * factor + std::fabs(center));
}

// Rounds to bf16: what lies within the error may end on either side of a boundary.
void round_enclosed(double& center, double& error) {
  const auto rounded = [](double value) { return static_cast<double>(bf16_to_f32(f32_to_bf16(static_cast<float>(value)))); };
  const double low = rounded(center - error), high = rounded(center + error);
  center = (low + high) / 2;
  error = (high - low) / 2;
}

Enclosed expert_outputs(const FfnSpec& spec, const ExpertWeights& expert, ResidentFormats formats, const Enclosed& row) {
  Enclosed hidden = product(expert.up, formats.gate_up, expert.up_bias, row);
  const bool has_gate = spec.gate != GateKind::kNone;
  const Enclosed gates = has_gate ? product(expert.gate, formats.gate_up, expert.gate_bias, row) : hidden;
  for (size_t i = 0; i < hidden.centers.size(); ++i) {
    double center, error;
    enclose_gate(spec, gates.centers[i], gates.errors[i], hidden.centers[i], hidden.errors[i], center, error);
    round_enclosed(center, error);
    hidden.centers[i] = center;
    hidden.errors[i] = error;
  }
  return product(expert.down, formats.down, expert.down_bias, hidden);
}

}  // namespace

OutputBounds matrix_class_bounds(const FfnSpec& spec, std::span<const ExpertWeights> experts, ResidentFormats formats, const ForwardArgs& args) {
  OutputBounds bounds{std::vector<double>(size_t{args.num_rows} * spec.out_size), std::vector<double>(size_t{args.num_rows} * spec.out_size)};
  size_t pair = 0;
  for (uint32_t r = 0; r < args.num_rows; ++r) {
    std::vector<float> halves(spec.in_size);
    widen(args.row_dtype, args.rows + size_t{r} * spec.in_size * dtype_bytes(args.row_dtype), halves.data(), halves.size());
    round_to_bf16(halves.data(), halves.size());
    const Enclosed row{{halves.begin(), halves.end()}, std::vector<double>(halves.size(), 0.0)};
    std::vector<double> sums(spec.out_size, 0.0), errors(spec.out_size, 0.0), magnitudes(spec.out_size, 0.0);
    for (uint16_t n = 0; n < args.row_counts[r]; ++n, ++pair) {
      const Enclosed outputs = expert_outputs(spec, experts[args.local_expert_ids[pair]], formats, row);
      const double weight = static_cast<double>(args.weights[pair]);
      for (uint32_t o = 0; o < spec.out_size; ++o) {
        sums[o] += weight * outputs.centers[o];
        errors[o] += std::fabs(weight) * outputs.errors[o];
        magnitudes[o] += std::fabs(weight) * (std::fabs(outputs.centers[o]) + outputs.errors[o]);
      }
    }
    for (uint32_t o = 0; o < spec.out_size; ++o) {
      const double error = errors[o] + (args.row_counts[r] + 1) * 0x1p-24 * magnitudes[o];  // an fma each
      bounds.low[size_t{r} * spec.out_size + o] = sums[o] - error;
      bounds.high[size_t{r} * spec.out_size + o] = sums[o] + error;
    }
  }
  return bounds;
}

}  // namespace dflash::compute
