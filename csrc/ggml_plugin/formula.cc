// Reads activations out of the parameters of ggml's nodes.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/formula.h"

#include <cstring>
#include <optional>

#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {
namespace {

float float_parameter(const ggml_tensor& node, int position) {
  float value;
  std::memcpy(&value, &node.op_params[position], sizeof value);
  return value;
}

// What ggml calls gelu is the tanh approximation, and gelu_erf the exact one.
std::optional<Activation> activation_of_unary(int32_t op) {
  switch (op) {
    case GGML_UNARY_OP_SILU:       return Activation::kSilu;
    case GGML_UNARY_OP_GELU:       return Activation::kGeluTanh;
    case GGML_UNARY_OP_GELU_ERF:   return Activation::kGelu;
    case GGML_UNARY_OP_GELU_QUICK: return Activation::kQuickGelu;
    case GGML_UNARY_OP_RELU:       return Activation::kRelu;
    case GGML_UNARY_OP_SIGMOID:    return Activation::kSigmoid;
    default:                       return std::nullopt;
  }
}

std::optional<Activation> activation_of_glu(int32_t op) {
  switch (op) {
#ifdef DFLASH_GGML_HAS_SWIGLU_CLAMP
    case GGML_GLU_OP_SWIGLU_CLAMP:
#endif
    case GGML_GLU_OP_SWIGLU:
    case GGML_GLU_OP_SWIGLU_OAI:  return Activation::kSilu;
    case GGML_GLU_OP_GEGLU:       return Activation::kGeluTanh;
    case GGML_GLU_OP_GEGLU_ERF:   return Activation::kGelu;
    case GGML_GLU_OP_GEGLU_QUICK: return Activation::kQuickGelu;
    case GGML_GLU_OP_REGLU:       return Activation::kRelu;
    default:                      return std::nullopt;
  }
}

}  // namespace

Formula formula_of(const ggml_tensor& node) {
  Formula formula;
  std::optional<Activation> activation;
  if (node.op == GGML_OP_SQR && node.src[0] && node.src[0]->op == GGML_OP_UNARY) {
    if (node.src[0]->op_params[0] == GGML_UNARY_OP_RELU) activation = Activation::kReluSquared;
  } else if (node.op == GGML_OP_UNARY) {
    activation = activation_of_unary(node.op_params[0]);
  } else if (node.op == GGML_OP_GLU) {
    activation = activation_of_glu(node.op_params[0]);
    formula.is_gated = true;
    formula.gate = Gate::kGated;
    if (node.op_params[0] == GGML_GLU_OP_SWIGLU_OAI) {
      formula.gate = Gate::kClampedSwiglu;
      formula.alpha = float_parameter(node, 2);
      formula.up_offset = 1.0f;
      formula.gate_max = formula.up_limit = float_parameter(node, 3);
    }
#ifdef DFLASH_GGML_HAS_SWIGLU_CLAMP
    if (node.op_params[0] == GGML_GLU_OP_SWIGLU_CLAMP)
      formula.gate_max = formula.up_limit = float_parameter(node, 3);
#endif
  }
  formula.is_known = activation.has_value();
  formula.activation = activation.value_or(Activation::kSilu);
  return formula;
}

bool agrees(const Formula& formula, const dflash_moe_layer& planned) {
  if (!formula.is_known || static_cast<uint32_t>(formula.gate) != planned.gate) return false;
  if (formula.gate_max != planned.gate_max || formula.up_limit != planned.up_limit) return false;
  if (formula.gate == Gate::kClampedSwiglu)
    return formula.alpha == planned.alpha && formula.up_offset == planned.up_offset;
  return static_cast<uint32_t>(formula.activation) == planned.activation;
}

}  // namespace dflash::ggml_plugin
