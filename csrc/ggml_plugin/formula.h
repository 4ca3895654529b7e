// The activation of an expert, as a node of a graph says it and as the workers' plan says it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "c_interface/dflash_moe.h"

struct ggml_tensor;

namespace dflash::ggml_plugin {

// The numbers of `activation` and `gate` in a plan; csrc/compute/experts/ffn_spec.h has the
// formulas.
enum class Activation : uint32_t {
  kSilu = 0,
  kGelu = 1,
  kGeluTanh = 2,
  kRelu = 3,
  kReluSquared = 4,
  kSigmoid = 6,
  kQuickGelu = 7,
};
enum class Gate : uint32_t { kNone = 0, kGated = 1, kClampedSwiglu = 2 };

struct Formula {
  bool is_known = false;
  bool is_gated = false;
  Activation activation = Activation::kSilu;  // without meaning for kClampedSwiglu
  Gate gate = Gate::kNone;
  float alpha = 1.0f, up_offset = 0.0f;
  float gate_max = __builtin_inff(), up_limit = __builtin_inff();
};

// The formula of a GLU, UNARY or SQR node; not is_known for any other.
Formula formula_of(const ggml_tensor& node);

// Whether the workers compute it.
bool agrees(const Formula& formula, const dflash_moe_layer& planned);

}  // namespace dflash::ggml_plugin
