// The float64 oracle: the same function with float64 arithmetic and the C library's functions.
// Tests take tolerances from it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>

#include "base/dtype.h"
#include "compute/formats/dequantize.h"
#include "compute/reference/reference.h"

namespace dflash::compute {
namespace {

double element(Dtype dtype, const std::byte* data, int64_t index) {
  float value = 0.0f;
  widen(dtype, data + index * static_cast<int64_t>(dtype_bytes(dtype)), &value, 1);
  return static_cast<double>(value);
}

std::vector<double> project(const MatrixView& matrix, const VectorView& bias,
                            const std::vector<double>& input) {
  std::vector<double> output(matrix.outputs);
  std::vector<float> weights(matrix.inputs);
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    dequantize(matrix, o, 1, weights.data());
    double sum = bias.data == nullptr ? 0.0 : element(bias.dtype, bias.data, o * bias.stride);
    for (uint32_t i = 0; i < matrix.inputs; ++i) {
      sum += static_cast<double>(weights[i]) * input[i];
    }
    output[o] = sum;
  }
  return output;
}

double sigmoid_float64(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double activate_float64(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: return x * sigmoid_float64(x);
    case Activation::kGelu: return 0.5 * x * std::erfc(-x * std::sqrt(0.5));
    case Activation::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:        return std::max(0.0, x);
    case Activation::kReluSquared: return std::max(0.0, x) * std::max(0.0, x);
    case Activation::kIdentity:    return x;
    case Activation::kSigmoid:     return sigmoid_float64(x);
    case Activation::kQuickGelu:   return x * sigmoid_float64(1.702 * x);
  }
  return x;
}

}  // namespace

double gate_float64(const FfnSpec& spec, double g, double u) {
  if (spec.gate == GateKind::kNone) return activate_float64(spec.activation, u);
  g = std::min(static_cast<double>(spec.gate_max), g);
  u = std::clamp(u, -static_cast<double>(spec.up_limit), static_cast<double>(spec.up_limit));
  if (spec.gate == GateKind::kGated) return activate_float64(spec.activation, g) * u;
  return (u + static_cast<double>(spec.up_offset)) *
         (g * sigmoid_float64(static_cast<double>(spec.alpha) * g));
}

std::vector<double> forward_float64(const FfnSpec& spec, std::span<const ExpertWeights> experts,
                                    const ForwardArgs& args) {
  std::vector<double> sums(size_t{args.num_rows} * spec.out_size, 0.0);
  size_t pair = 0;
  for (uint32_t r = 0; r < args.num_rows; ++r) {
    std::vector<double> row(spec.in_size);
    for (uint32_t i = 0; i < spec.in_size; ++i) {
      row[i] = element(args.row_dtype, args.rows, static_cast<int64_t>(r) * spec.in_size + i);
    }
    for (uint16_t n = 0; n < args.row_counts[r]; ++n, ++pair) {
      const ExpertWeights& expert = experts[args.local_expert_ids[pair]];
      std::vector<double> hidden = project(expert.up, expert.up_bias, row);
      const bool has_gate = spec.gate != GateKind::kNone;
      const std::vector<double> gates =
          has_gate ? project(expert.gate, expert.gate_bias, row) : hidden;
      for (size_t i = 0; i < hidden.size(); ++i)
        hidden[i] = gate_float64(spec, gates[i], hidden[i]);
      const std::vector<double> down = project(expert.down, expert.down_bias, hidden);
      double* sum = sums.data() + size_t{r} * spec.out_size;
      for (size_t o = 0; o < down.size(); ++o)
        sum[o] += static_cast<double>(args.weights[pair]) * down[o];
    }
  }
  return sums;
}

}  // namespace dflash::compute
