// Propagates an enclosure through a whole layer: inputs, gate and up, activation, down, routed sum.
// Each step adds the largest error that its arithmetic may make.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/reference.h"

#include <algorithm>
#include <cmath>

#include "base/dtype.h"
#include "compute/formats/dequantize.h"
#include "compute/reference/bf16_dot.h"
#include "compute/reference/f16_dot2.h"

namespace dflash::compute {
namespace {

// Values that are known up to an error: each lies within errors[i] of centers[i].
struct Enclosed {
  std::vector<double> centers, errors;
};

// A matrix as a class multiplies it. For each weight: its value, the magnitude of what it is made
// of
// (|code * scale| + |offset|, which is at least its size), and how much of it an instruction may
// lose.
struct Factors {
  std::vector<double> values, magnitudes, losses;  // [outputs, inputs]
};

// By how much the arithmetic of a product of n terms may be wrong: relative to the sum of the
// terms' magnitudes, and absolutely for each term, per unit of the largest factor.
struct Precision {
  double relative = 0.0, absolute = 0.0;
};

constexpr double kLeastNormalHalf = 0x1p-14;  // an instruction may take smaller values for zero

Factors bf16_factors(const MatrixView& view, WeightFormat resident) {
  std::vector<float> values(size_t{view.outputs} * view.inputs);
  dequantize(view, 0, view.outputs, values.data());
  if (!format_facts(resident).is_stored) {
    for (uint32_t o = 0; o < view.outputs; ++o)
      requantize_row(resident, &values[size_t{o} * view.inputs], view.inputs);
  }
  round_to_bf16(values.data(), values.size());
  Factors found{
      {values.begin(), values.end()},
      {},
      std::vector<double>(values.size(), 0.0)
  };
  for (double value : found.values) found.magnitudes.push_back(std::fabs(value));
  return found;
}

// An instruction aligns 16 products and the sum so far to the largest of them, cuts each at the
// 24th bit or below, and normalises. That makes at most 17 errors of 2^-23 of the sum of magnitudes
// and one more rounding. Each chain of 256 is added with one rounding, and a bias with another.
// Units that flush subnormals (gfx908, gfx90a) lose up to 2^-126 of the other factor per term.
Precision bf16_precision(double n) {
  const double steps = std::ceil(n / 16);
  return {(17 * steps + steps + std::ceil(n / 256) + 2) * 0x1p-23, 3 * 0x1p-126};
}

Factors half_factors(const MatrixView& view, WeightFormat resident) {
  const HalfWeights halves = half_weights(view, resident);
  Factors found;
  for (size_t i = 0; i < halves.codes.size(); ++i) {
    const size_t group =
        i / view.inputs * halves.num_groups() + i % view.inputs / halves.group_inputs;
    const double code = static_cast<double>(halves.codes[i]),
                 value = code * static_cast<double>(halves.scales[group]);
    const double offset = halves.offsets.empty() ? 0.0 : static_cast<double>(halves.offsets[group]);
    found.values.push_back(value - offset);
    found.magnitudes.push_back(std::fabs(value) + std::fabs(offset));
    found.losses.push_back(std::fabs(code) < kLeastNormalHalf ? std::fabs(value) : 0.0);
  }
  return found;
}

// An instruction may cut two products and the sum so far at the 24th bit of the largest and then
// normalise, which makes 4 errors of 2^-23 for each of a group's 16 pairs. What follows is float32
// with 2^-24 a step: the product of the scales, at most 32 steps of a chain (two halves for each
// of 8 groups, each with an offset), 6 for the sum of a row's codes and its scale where there is an
// offset, one addition per chain, and a bias. One more 2^-23 covers errors of errors. A product of
// scales below the normal float32 is wrong by up to 2^-150, and sums of at most 32 * 2^30 multiply
// that.
Precision half_precision(double n) {
  return {(64 + (1 + 32 + 6 + std::ceil(n / 256) + 1) / 2 + 1) * 0x1p-23, 0x1p-114};
}

Enclosed product(const NumericsFacts& facts, const MatrixView& view, WeightFormat resident,
                 const VectorView& bias, const Enclosed& inputs) {
  const bool has_halves = facts.weights == WeightRounding::kF16;
  const Factors weights = has_halves ? half_factors(view, resident) : bf16_factors(view, resident);
  const Precision precision =
      has_halves ? half_precision(view.inputs) : bf16_precision(view.inputs);
  const std::vector<float> biases = widen_vector(bias, view.outputs);
  Enclosed found{std::vector<double>(view.outputs), std::vector<double>(view.outputs)};
  for (uint32_t o = 0; o < view.outputs; ++o) {
    double sum = biases.empty() ? 0.0 : static_cast<double>(biases[o]), magnitude = std::fabs(sum),
           moved = 0.0, largest = 1.0;
    for (uint32_t k = 0; k < view.inputs; ++k) {
      const size_t at = size_t{o} * view.inputs + k;
      const double reach = std::fabs(inputs.centers[k]) + inputs.errors[k];
      sum += weights.values[at] * inputs.centers[k];
      moved += weights.magnitudes[at] * inputs.errors[k] + weights.losses[at] * reach;
      magnitude += weights.magnitudes[at] * reach;
      largest = std::max({largest, weights.magnitudes[at], std::fabs(inputs.centers[k])});
    }
    found.centers[o] = sum;
    found.errors[o] =
        moved + precision.relative * magnitude + view.inputs * largest * precision.absolute;
  }
  return found;
}

// Returns the steepest slope of an activation over |x| <= reach.
double steepest(Activation activation, double reach) {
  switch (activation) {
    case Activation::kRelu:
    case Activation::kIdentity:    return 1.0;
    case Activation::kReluSquared: return 2 * reach;
    case Activation::kSigmoid:     return 0.25;
    case Activation::kSilu:
    case Activation::kQuickGelu:   return 1.1;  // 1.0998 at x = 2.4, whatever the factor inside
    case Activation::kGelu:
    case Activation::kGeluTanh:    return 1.13;  // 1.1289 at x = sqrt(2)
  }
  return INFINITY;
}

// Sets `center` and `error` such that center +- error encloses gate(g, u), before it is rounded,
// for every g within g_error and every u within u_error. `kStep` covers the float32 operations of
// an activation, which are at most eight.
void enclose_gate(const FfnSpec& spec, double g, double g_error, double u, double u_error,
                  double& center, double& error) {
  constexpr double kStep = 0x1p-20;
  center = gate_float64(spec, g, u);
  if (spec.gate == GateKind::kNone) {
    const double reach = std::fabs(u) + u_error;
    error = steepest(spec.activation, reach) * u_error + kStep * (reach + std::fabs(center));
    return;
  }
  const bool is_plain = spec.gate == GateKind::kGated;
  // The slope is that of a(g), or of g * sigmoid(alpha * g).
  const double slope = is_plain ? steepest(spec.activation, std::fabs(g) + g_error) : 1.1;
  const double offset = is_plain ? 0.0 : std::fabs(static_cast<double>(spec.up_offset));
  const double factor =
      std::min(std::fabs(u), static_cast<double>(spec.up_limit)) + u_error + offset;
  const double reach = std::fabs(g) + g_error;
  // This bounds |a(g)|: every activation stays below its slope times |g|, or below 1.
  const double activated = std::max(reach * std::max(slope, 1.0), 1.0);
  error = slope * g_error * factor + activated * u_error +
          kStep * (activated * factor + std::fabs(center));
}

// Rounds a row to bf16. Values within the error may end on either side of a rounding boundary, so
// that both ends of the enclosure are rounded.
void round_row_to_bf16(Enclosed& row) {
  const auto rounded = [](double value) {
    return static_cast<double>(bf16_to_f32(f32_to_bf16(static_cast<float>(value))));
  };
  for (size_t i = 0; i < row.centers.size(); ++i) {
    const double low = rounded(row.centers[i] - row.errors[i]),
                 high = rounded(row.centers[i] + row.errors[i]);
    row.centers[i] = (low + high) / 2;
    row.errors[i] = (high - low) / 2;
  }
}

// Rounds a row to f16 codes. If the scale is off by a power of two, no value moves that is normal
// in f16, which has 11 bits under either scale. A value that is not normal is below 2^-28 of the
// group's largest (2^-140 in groups of the least scale), and may be taken for zero.
void round_row_to_halves(Enclosed& row, uint32_t group_inputs) {
  const auto rounded = [](double value) {
    int exponent;
    const double fraction = std::frexp(value, &exponent);
    return std::ldexp(std::nearbyint(std::ldexp(fraction, 11)), exponent - 11);
  };
  for (size_t begin = 0; begin < row.centers.size(); begin += group_inputs) {
    const size_t end = std::min(begin + group_inputs, row.centers.size());
    double largest = 0x1p-112;
    for (size_t i = begin; i < end; ++i)
      largest = std::max(largest, std::fabs(row.centers[i]) + row.errors[i]);
    for (size_t i = begin; i < end; ++i) {
      const double low = rounded(row.centers[i] - row.errors[i]),
                   high = rounded(row.centers[i] + row.errors[i]);
      row.centers[i] = (low + high) / 2;
      row.errors[i] = (high - low) / 2;
      if (std::fabs(row.centers[i]) - row.errors[i] < 2 * 0x1p-28 * largest)
        row.errors[i] += 0x1p-28 * largest;
    }
  }
}

void round_inputs(const NumericsFacts& facts, Enclosed& row) {
  if (facts.inputs == InputRounding::kF16)
    round_row_to_halves(row, facts.group_inputs);
  else
    round_row_to_bf16(row);
}

Enclosed expert_outputs(const NumericsFacts& facts, const FfnSpec& spec,
                        const ExpertWeights& expert, ResidentFormats formats, const Enclosed& row) {
  Enclosed hidden = product(facts, expert.up, formats.gate_up, expert.up_bias, row);
  const bool has_gate = spec.gate != GateKind::kNone;
  const Enclosed gates =
      has_gate ? product(facts, expert.gate, formats.gate_up, expert.gate_bias, row) : hidden;
  for (size_t i = 0; i < hidden.centers.size(); ++i) {
    double center, error;
    enclose_gate(spec, gates.centers[i], gates.errors[i], hidden.centers[i], hidden.errors[i],
                 center, error);
    hidden.centers[i] = center;
    hidden.errors[i] = error;
  }
  round_inputs(facts, hidden);
  return product(facts, expert.down, formats.down, expert.down_bias, hidden);
}

}  // namespace

OutputBounds class_bounds(NumericsClass numerics, const FfnSpec& spec,
                          std::span<const ExpertWeights> experts, ResidentFormats formats,
                          const ForwardArgs& args) {
  const NumericsFacts& facts = numerics_facts(numerics);
  OutputBounds bounds{std::vector<double>(size_t{args.num_rows} * spec.out_size),
                      std::vector<double>(size_t{args.num_rows} * spec.out_size)};
  size_t pair = 0;
  for (uint32_t r = 0; r < args.num_rows; ++r) {
    std::vector<float> values(spec.in_size);
    widen(args.row_dtype, args.rows + size_t{r} * spec.in_size * dtype_bytes(args.row_dtype),
          values.data(), values.size());
    Enclosed row{
        {values.begin(), values.end()},
        std::vector<double>(values.size(), 0.0)
    };
    round_inputs(facts, row);
    std::vector<double> sums(spec.out_size, 0.0), errors(spec.out_size, 0.0),
        magnitudes(spec.out_size, 0.0);
    for (uint16_t n = 0; n < args.row_counts[r]; ++n, ++pair) {
      const Enclosed outputs =
          expert_outputs(facts, spec, experts[args.local_expert_ids[pair]], formats, row);
      const double weight = static_cast<double>(args.weights[pair]);
      for (uint32_t o = 0; o < spec.out_size; ++o) {
        sums[o] += weight * outputs.centers[o];
        errors[o] += std::fabs(weight) * outputs.errors[o];
        magnitudes[o] += std::fabs(weight) * (std::fabs(outputs.centers[o]) + outputs.errors[o]);
      }
    }
    for (uint32_t o = 0; o < spec.out_size; ++o) {
      // The routed sum is one fma, hence one rounding, for each expert.
      const double error = errors[o] + (args.row_counts[r] + 1) * 0x1p-24 * magnitudes[o];
      bounds.low[size_t{r} * spec.out_size + o] = sums[o] - error;
      bounds.high[size_t{r} * spec.out_size + o] = sums[o] + error;
    }
  }
  return bounds;
}

}  // namespace dflash::compute
