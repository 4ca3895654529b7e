// Binds the row operators of a host: norms, rotary embedding, routing, gates, argmax. Memory is
// torch's and comes as addresses, with strides in bytes and the names of dtypes; the caller keeps
// it alive and gives sizes that it has. Every operator computes without the GIL, at once or in a
// program.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

#include <string>

#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/program.h"
#include "compute/cpu/row_operators.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using compute::RowsTarget;
using compute::RowsView;

RowsView view(uintptr_t address, size_t stride_bytes, const std::string& dtype, uint32_t num_rows) {
  if (address == 0) return {nullptr, parse_dtype(dtype), 0, num_rows};
  return {reinterpret_cast<const std::byte*>(address), parse_dtype(dtype), stride_bytes, num_rows};
}

RowsTarget target(uintptr_t address, size_t stride_bytes, const std::string& dtype) {
  return {reinterpret_cast<std::byte*>(address), parse_dtype(dtype), stride_bytes};
}

// A vector of float32; null where the address is 0. Raises ConfigError for one that is not aligned.
const float* floats(uintptr_t address) {
  if (address % alignof(float) != 0)
    raise(Error{ErrorCode::kInvalidArgument,
                "a vector of float32 must begin at a multiple of 4 bytes"});
  return reinterpret_cast<const float*>(address);
}

template <class Value, size_t N>
Value choose(const char* what, const std::string& name, const char* const (&names)[N]) {
  std::string known;
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Value>(i);
    known += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  raise(Error{ErrorCode::kInvalidArgument,
              std::string(what) + " '" + name + "' is not allowed; choose from " + known});
}

auto normalization(const HostPoolBox& pool, const compute::NormArgs& args) {
  return [&pool, args] { return compute::normalize(*pool.pool, pool.isa, args); };
}

void bind_norms(py::module_& module) {
  def_operator(
      module, "rms_norm",
      +[](const HostPoolBox& pool, uintptr_t rows_address, size_t row_stride_bytes,
          const std::string& row_dtype, uint32_t num_rows, uint32_t width, uintptr_t out_address,
          size_t out_stride_bytes, const std::string& out_dtype, float epsilon,
          uintptr_t weight_address, bool adds_one, uintptr_t residual_address,
          size_t residual_stride_bytes, const std::string& residual_dtype, uintptr_t sum_address,
          size_t sum_stride_bytes, const std::string& sum_dtype, bool normalizes_rounded_sum) {
        return normalization(
            pool,
            {
                .form = {compute::NormKind::kRms, epsilon, adds_one, normalizes_rounded_sum},
                .width = width,
                .rows = view(rows_address, row_stride_bytes, row_dtype, num_rows),
                .residual = view(residual_address, residual_stride_bytes, residual_dtype, num_rows),
                .sum = target(sum_address, sum_stride_bytes, sum_dtype),
                .weight = floats(weight_address),
                .bias = nullptr,
                .out = target(out_address, out_stride_bytes, out_dtype)
        });
      },
      py::arg("pool"), py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
      py::arg("num_rows"), py::arg("width"), py::arg("out_address"), py::arg("out_stride_bytes"),
      py::arg("out_dtype"), py::arg("epsilon"), py::arg("weight_address") = 0,
      py::arg("adds_one") = false, py::arg("residual_address") = 0,
      py::arg("residual_stride_bytes") = 0, py::arg("residual_dtype") = "f32",
      py::arg("sum_address") = 0, py::arg("sum_stride_bytes") = 0, py::arg("sum_dtype") = "f32",
      py::arg("normalizes_rounded_sum") = false,
      "x = rows, or rows + residual, which `sum` keeps, rounded to sum_dtype; with "
      "normalizes_rounded_sum it is that rounded sum that is normalised. out = x / sqrt(mean(x^2) "
      "+ epsilon) * weight, or * (1 + weight) with adds_one; weight is [width].");
  def_operator(
      module, "layer_norm",
      +[](const HostPoolBox& pool, uintptr_t rows_address, size_t row_stride_bytes,
          const std::string& row_dtype, uint32_t num_rows, uint32_t width, uintptr_t out_address,
          size_t out_stride_bytes, const std::string& out_dtype, float epsilon,
          uintptr_t weight_address, uintptr_t bias_address) {
        return normalization(pool,
                             {
                                 .form = {compute::NormKind::kLayer, epsilon, false, false},
                                 .width = width,
                                 .rows = view(rows_address, row_stride_bytes, row_dtype, num_rows),
                                 .residual = {},
                                 .sum = {},
                                 .weight = floats(weight_address),
                                 .bias = floats(bias_address),
                                 .out = target(out_address, out_stride_bytes, out_dtype)
        });
      },
      py::arg("pool"), py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
      py::arg("num_rows"), py::arg("width"), py::arg("out_address"), py::arg("out_stride_bytes"),
      py::arg("out_dtype"), py::arg("epsilon"), py::arg("weight_address") = 0,
      py::arg("bias_address") = 0,
      "out = (x - mean) / sqrt(variance + epsilon) * weight + bias, both [width].");
}

constexpr const char* kRotaryLayouts[] = {"halves", "interleaved", "interleaved_to_halves"};

void bind_rotary(py::module_& module) {
  def_operator(
      module, "rotate",
      +[](const HostPoolBox& pool, uintptr_t rows_address, size_t row_stride_bytes,
          const std::string& row_dtype, uint32_t num_rows, uint32_t num_heads, uint32_t head_dim,
          uintptr_t out_address, size_t out_stride_bytes, const std::string& out_dtype,
          uintptr_t cos_address, uintptr_t sin_address, size_t table_stride_bytes,
          uint32_t rotary_dim, uint32_t rotary_offset, const std::string& layout,
          bool has_full_tables) {
        const compute::RotateArgs args = {
            .form = {num_heads, head_dim, rotary_dim, rotary_offset,
                     choose<compute::RotaryLayout>("layout", layout, kRotaryLayouts),
                     has_full_tables},
            .rows = view(rows_address, row_stride_bytes, row_dtype, num_rows),
            .cos = view(cos_address, table_stride_bytes, "f32", num_rows),
            .sin = view(sin_address, table_stride_bytes, "f32", num_rows),
            .out = target(out_address, out_stride_bytes, out_dtype)
        };
        return [&pool, args] { return compute::rotate(*pool.pool, pool.isa, args); };
      },
      py::arg("pool"), py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
      py::arg("num_rows"), py::arg("num_heads"), py::arg("head_dim"), py::arg("out_address"),
      py::arg("out_stride_bytes"), py::arg("out_dtype"), py::arg("cos_address"),
      py::arg("sin_address"), py::arg("table_stride_bytes"), py::arg("rotary_dim"),
      py::arg("rotary_offset") = 0, py::arg("layout") = "halves",
      py::arg("has_full_tables") = false,
      "Rows are [num_rows, num_heads, head_dim], heads adjacent. Of each head, rotary_dim values "
      "from rotary_offset on are rotated and the rest is copied. Cosines and sines are [num_rows, "
      "rotary_dim / 2] or, with has_full_tables, [num_rows, rotary_dim]. Layouts: \"halves\", "
      "\"interleaved\", \"interleaved_to_halves\" (read interleaved, written as halves).");
}

constexpr const char* kRouterScores[] = {"softmax", "sigmoid", "identity"};
constexpr const char* kRouterWeights[] = {"score", "softmax_of_chosen", "sigmoid_of_chosen",
                                          "sparse_mixer"};
constexpr const char* kGroupScores[] = {"max", "top_two_sum"};
constexpr const char* kIdTypes[] = {"i32", "i64"};

void bind_router(py::module_& module) {
  const compute::RouterForm defaults;
  py::class_<compute::RouterForm>(
      module, "RouterForm",
      "How a router chooses experts and weighs them (csrc/compute/operators/router.h). ConfigError "
      "for a word that is not known.")
      .def(py::init([](uint32_t num_experts, uint32_t top_k, const std::string& score,
                       const std::string& weight, uint32_t num_groups, uint32_t topk_groups,
                       const std::string& group_score, float excluded, bool normalizes,
                       float sum_epsilon, float sum_floor, float scale, float mixer_threshold) {
             return compute::RouterForm{
                 num_experts,
                 top_k,
                 choose<compute::RouterScore>("score", score, kRouterScores),
                 choose<compute::RouterWeight>("weight", weight, kRouterWeights),
                 num_groups,
                 topk_groups,
                 choose<compute::GroupScore>("group_score", group_score, kGroupScores),
                 excluded,
                 normalizes,
                 sum_epsilon,
                 sum_floor,
                 scale,
                 mixer_threshold};
           }),
           py::kw_only(), py::arg("num_experts"), py::arg("top_k"), py::arg("score") = "softmax",
           py::arg("weight") = "score", py::arg("num_groups") = defaults.num_groups,
           py::arg("topk_groups") = defaults.topk_groups, py::arg("group_score") = "top_two_sum",
           py::arg("excluded") = defaults.excluded, py::arg("normalizes") = defaults.normalizes,
           py::arg("sum_epsilon") = defaults.sum_epsilon, py::arg("sum_floor") = defaults.sum_floor,
           py::arg("scale") = defaults.scale, py::arg("mixer_threshold") = defaults.mixer_threshold,
           "score: softmax, sigmoid or identity.\nweight: score, softmax_of_chosen, "
           "sigmoid_of_chosen or sparse_mixer.\ngroup_score: top_two_sum or max.\nexcluded: The "
           "choice of experts outside the chosen groups.\nnormalizes: Divides by max(sum + "
           "sum_epsilon, sum_floor).\nmixer_threshold: Of a sparse mixer.");
  def_operator(
      module, "route",
      +[](const HostPoolBox& pool, const compute::RouterForm& form, uintptr_t logits_address,
          size_t logits_stride_bytes, const std::string& logits_dtype, uint32_t num_rows,
          uintptr_t topk_ids_address, const std::string& id_type, uintptr_t topk_weights_address,
          uintptr_t bias_address, uintptr_t expert_scales_address) {
        const compute::RouteArgs args = {
            .form = form,
            .logits = view(logits_address, logits_stride_bytes, logits_dtype, num_rows),
            .bias = floats(bias_address),
            .expert_scales = floats(expert_scales_address),
            .topk_ids = reinterpret_cast<std::byte*>(topk_ids_address),
            .id_type = choose<compute::IdType>("id_type", id_type, kIdTypes),
            .topk_weights = const_cast<float*>(floats(topk_weights_address))};
        return [&pool, args] { return compute::route(*pool.pool, pool.isa, args); };
      },
      py::arg("pool"), py::arg("form"), py::arg("logits_address"), py::arg("logits_stride_bytes"),
      py::arg("logits_dtype"), py::arg("num_rows"), py::arg("topk_ids_address"), py::arg("id_type"),
      py::arg("topk_weights_address"), py::arg("bias_address") = 0,
      py::arg("expert_scales_address") = 0,
      "Writes topk_ids [num_rows, top_k] (\"i32\" or \"i64\") and topk_weights [num_rows, top_k] "
      "(float32), in descending order of choice. The bias [num_experts] counts for the choice "
      "only; expert_scales [num_experts] multiply the weights.");
  def_operator(
      module, "argmax",
      +[](const HostPoolBox& pool, uintptr_t rows_address, size_t row_stride_bytes,
          const std::string& row_dtype, uint32_t num_rows, uint32_t width, uintptr_t out_address) {
        if (out_address % alignof(int64_t) != 0)
          raise(Error{ErrorCode::kInvalidArgument, "out must begin at a multiple of 8 bytes"});
        const RowsView rows = view(rows_address, row_stride_bytes, row_dtype, num_rows);
        return [&pool, width, rows, out_address] {
          return compute::argmax(*pool.pool, pool.isa, width, rows,
                                 reinterpret_cast<int64_t*>(out_address));
        };
      },
      py::arg("pool"), py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
      py::arg("num_rows"), py::arg("width"), py::arg("out_address"),
      "Writes the place of each row's largest value to int64 out [num_rows]: the lowest among "
      "equals.");
}

// An FfnSpec of which a gate looks at everything but the sizes; these are 1.
struct GateForm {
  compute::FfnSpec spec;
};

GateForm make_gate_form(const std::string& activation, const std::string& gate, float alpha,
                        float up_offset, float gate_max, float up_limit) {
  py::dict fields;
  for (const char* size : {"in_size", "intermediate_size", "out_size"}) fields[size] = 1;
  fields["activation"] = activation, fields["gate"] = gate;
  fields["alpha"] = alpha, fields["up_offset"] = up_offset;
  fields["gate_max"] = gate_max, fields["up_limit"] = up_limit;
  return {parse_ffn_spec(fields)};
}

void bind_gates(py::module_& module) {
  const compute::FfnSpec defaults;
  py::class_<GateForm>(
      module, "GateForm",
      "The activation and gate of an MLP, with the words and limits of an FfnSpec. "
      "UnsupportedError for a word that is not known or a value that is not supported.")
      .def(py::init(&make_gate_form), py::kw_only(), py::arg("activation") = "silu",
           py::arg("gate") = "gated", py::arg("alpha") = defaults.alpha,
           py::arg("up_offset") = defaults.up_offset, py::arg("gate_max") = defaults.gate_max,
           py::arg("up_limit") = defaults.up_limit, "gate: or none, clamped_swiglu");
  def_operator(
      module, "apply_gate",
      +[](const HostPoolBox& pool, const GateForm& form, uintptr_t gate_address,
          size_t gate_stride_bytes, const std::string& gate_dtype, uintptr_t up_address,
          size_t up_stride_bytes, const std::string& up_dtype, uint32_t num_rows, uint32_t width,
          uintptr_t out_address, size_t out_stride_bytes, const std::string& out_dtype) {
        const compute::GateArgs args = {
            .spec = form.spec,
            .width = width,
            .gate = view(gate_address, gate_stride_bytes, gate_dtype, num_rows),
            .up = view(up_address, up_stride_bytes, up_dtype, num_rows),
            .out = target(out_address, out_stride_bytes, out_dtype)};
        return [&pool, args] { return compute::apply_gate(*pool.pool, pool.isa, args); };
      },
      py::arg("pool"), py::arg("form"), py::arg("gate_address"), py::arg("gate_stride_bytes"),
      py::arg("gate_dtype"), py::arg("up_address"), py::arg("up_stride_bytes"), py::arg("up_dtype"),
      py::arg("num_rows"), py::arg("width"), py::arg("out_address"), py::arg("out_stride_bytes"),
      py::arg("out_dtype"),
      "out = act(gate) * up for rows of `width`; with gate \"none\", act(up), and the gate's "
      "address is 0.");
  def_operator(
      module, "add_scaled",
      +[](const HostPoolBox& pool, uintptr_t rows_address, size_t row_stride_bytes,
          const std::string& row_dtype, uint32_t num_rows, uint32_t width, uintptr_t out_address,
          size_t out_stride_bytes, const std::string& out_dtype, uintptr_t base_address,
          size_t base_stride_bytes, const std::string& base_dtype, uintptr_t gate_address,
          size_t gate_stride_bytes, const std::string& gate_dtype, float scale) {
        const compute::AddScaledArgs args = {
            .width = width,
            .rows = view(rows_address, row_stride_bytes, row_dtype, num_rows),
            .base = view(base_address, base_stride_bytes, base_dtype, num_rows),
            .gate = view(gate_address, gate_stride_bytes, gate_dtype, num_rows),
            .scale = scale,
            .out = target(out_address, out_stride_bytes, out_dtype)};
        return [&pool, args] { return compute::add_scaled(*pool.pool, pool.isa, args); };
      },
      py::arg("pool"), py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
      py::arg("num_rows"), py::arg("width"), py::arg("out_address"), py::arg("out_stride_bytes"),
      py::arg("out_dtype"), py::arg("base_address") = 0, py::arg("base_stride_bytes") = 0,
      py::arg("base_dtype") = "f32", py::arg("gate_address") = 0, py::arg("gate_stride_bytes") = 0,
      py::arg("gate_dtype") = "f32", py::arg("scale") = 1.0f,
      "out = base + rows * s, where s is sigmoid(gate[row]), or `scale` without a gate; gate is "
      "[num_rows, 1].");
}

}  // namespace

void bind_rows(py::module_& module) {
  bind_norms(module);
  bind_rotary(module);
  bind_router(module);
  bind_gates(module);
}

}  // namespace dflash::bindings
