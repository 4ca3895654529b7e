// Random weights and the double loop.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/experts_model.h"

#include <doctest/doctest.h>

#include <random>

#include "compute/reference/reference.h"

namespace dflash::ggml_plugin {

std::vector<float> random_values(size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> values(count);
  for (float& value : values) value = uniform(engine);
  return values;
}

ExpertsModel::ExpertsModel(const ModelOptions& options) : options_(options) {
  const auto& o = options_;
  if (o.is_fused) {
    add("gate_up", o.in_size, 2 * o.intermediate_size, o.has_gate_up_bias);
  } else {
    if (is_gated()) add("gate", o.in_size, o.intermediate_size, o.has_gate_up_bias);
    add("up", o.in_size, o.intermediate_size, o.has_gate_up_bias);
  }
  add("down", o.intermediate_size, o.out_size, o.has_down_bias);
}

void ExpertsModel::add(const std::string& part, uint32_t inputs, uint32_t outputs, bool has_bias) {
  const auto push = [&](const char* role, std::vector<int64_t> extents) {
    size_t count = 1;
    for (int64_t extent : extents) count *= static_cast<size_t>(extent);
    const auto seed = options_.seed * 100 + static_cast<unsigned>(tensors_.size());
    tensors_.push_back({name(part + "." + role), extents, random_values(count, seed)});
  };
  push("weight", {inputs, outputs, options_.num_experts});
  if (has_bias) push("bias", {outputs, options_.num_experts});
  if (options_.has_scales) push("scale", {options_.num_experts});
}

std::string ExpertsModel::name(const std::string& part_and_role) const {
  const size_t dot = part_and_role.find('.');
  return "blk." + std::to_string(options_.layer) + ".ffn_" + part_and_role.substr(0, dot) +
         "_exps" + part_and_role.substr(dot);
}

const FileTensor& ExpertsModel::tensor(const std::string& part_and_role) const {
  const std::string wanted = name(part_and_role);
  for (const FileTensor& tensor : tensors_)
    if (tensor.name == wanted) return tensor;
  FAIL("the model has no tensor ", wanted);
  return tensors_.front();
}

compute::FfnSpec ExpertsModel::spec() const {
  const auto& o = options_;
  return {.in_size = o.in_size,
          .intermediate_size = o.intermediate_size,
          .out_size = o.out_size,
          .activation = o.activation,
          .gate = o.gate,
          .has_gate_up_bias = o.has_gate_up_bias,
          .has_down_bias = o.has_down_bias,
          .alpha = o.alpha,
          .up_offset = o.up_offset,
          .gate_max = o.gate_max,
          .up_limit = o.up_limit};
}

dflash_moe_layer ExpertsModel::facts() const {
  const auto& o = options_;
  return {.struct_bytes = sizeof(dflash_moe_layer),
          .name = "layer",
          .layer = o.layer,
          .in_size = o.in_size,
          .intermediate_size = o.intermediate_size,
          .out_size = o.out_size,
          .num_experts = o.num_experts,
          .top_k = o.top_k,
          .activation = static_cast<uint32_t>(o.activation),
          .gate = static_cast<uint32_t>(o.gate),
          .alpha = o.alpha,
          .up_offset = o.up_offset,
          .gate_max = o.gate_max,
          .up_limit = o.up_limit,
          .has_gate_up_bias = o.has_gate_up_bias,
          .has_down_bias = o.has_down_bias};
}

std::vector<float> ExpertsModel::held(const std::string& part) const {
  std::vector<float> values = tensor(part + ".weight").values;
  if (!options_.has_scales) return values;
  const std::vector<float>& scales = tensor(part + ".scale").values;
  const size_t per_expert = values.size() / options_.num_experts;
  for (size_t i = 0; i < values.size(); ++i) values[i] *= scales[i / per_expert];
  return values;
}

std::vector<float> ExpertsModel::expected(const std::vector<float>& x,
                                          const std::vector<int32_t>& ids,
                                          const std::vector<float>& weights, size_t width,
                                          size_t top_k) const {
  const size_t in = options_.in_size, mid = options_.intermediate_size, out = options_.out_size;
  const size_t num_tokens = x.size() / in;
  const std::string first = options_.is_fused ? "gate_up" : "up";
  const std::vector<float> up = held(first), down = held("down");
  const std::vector<float> gate = is_gated() && !options_.is_fused ? held("gate") : up;
  const compute::FfnSpec formula = spec();
  // Row `row` of an expert's matrix times its input, plus its bias.
  const auto output = [&](const std::vector<float>& matrix, const std::string& part, size_t expert,
                          size_t outputs, size_t row, auto value_at, size_t inputs, bool has_bias) {
    double sum = has_bias ? tensor(part + ".bias").values[expert * outputs + row] : 0.0;
    for (size_t i = 0; i < inputs; ++i)
      sum += static_cast<double>(matrix[(expert * outputs + row) * inputs + i]) * value_at(i);
    return sum;
  };
  std::vector<float> result(num_tokens * out);
  for (size_t token = 0; token < num_tokens; ++token) {
    std::vector<double> sums(out);
    for (size_t slot = 0; slot < top_k; ++slot) {
      const auto expert = static_cast<size_t>(ids[token * width + slot]);
      const auto x_at = [&](size_t i) { return static_cast<double>(x[token * in + i]); };
      std::vector<double> h(mid);
      for (size_t row = 0; row < mid; ++row) {
        const size_t rows = options_.is_fused ? 2 * mid : mid;
        const size_t up_row = options_.is_fused ? mid + row : row;
        const double u =
            output(up, first, expert, rows, up_row, x_at, in, formula.has_gate_up_bias);
        const double g = is_gated() ? output(gate, options_.is_fused ? first : "gate", expert, rows,
                                             row, x_at, in, formula.has_gate_up_bias)
                                    : 0.0;
        h[row] = compute::gate_float64(formula, g, u);
      }
      for (size_t row = 0; row < out; ++row)
        sums[row] += static_cast<double>(weights[token * width + slot]) *
                     output(
                         down, "down", expert, out, row, [&](size_t i) { return h[i]; }, mid,
                         formula.has_down_bias);
    }
    for (size_t row = 0; row < out; ++row)
      result[token * out + row] = static_cast<float>(sums[row]);
  }
  return result;
}

}  // namespace dflash::ggml_plugin
