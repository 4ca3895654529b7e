// What one expert computes. The host fills it from the model and sends it to workers as data with a
// closed schema (docs/protocol.md); the reference and every backend compute by it.
//
//   g = W_gate x + b_gate;  u = W_up x + b_up;  h = gate(g, u);  d = W_down h + b_down
//   y += routing_weight * d
//
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/result.h"

namespace dflash::compute {

// The values are on the wire, so that new ones are only appended. The formulas are normative and
// live in activation.h.
enum class Activation : uint8_t {
  kSilu = 0,      // a(x) = x / (1 + exp(-x))
  kGelu = 1,      // exact, with erf
  kGeluTanh = 2,  // tanh approximation
  kRelu = 3,
  kReluSquared = 4,
  kIdentity = 5,
  kSigmoid = 6,
  kQuickGelu = 7,  // x * sigmoid(1.702 x)
};

// How gate and up are joined. These values are part of the protocol, too.
enum class GateKind : uint8_t {
  kNone = 0,   // h = a(u); there is no gate matrix
  kGated = 1,  // h = a(clamp(g)) * clamp(u) with the clamps below; infinite limits do nothing
  // The gate of gpt-oss: g = min(g, limit), u = clamp(u, -limit, limit),
  // h = (u + up_offset) * (g * sigmoid(alpha * g)).
  kClampedSwiglu = 2
};

struct FfnSpec {
  uint32_t in_size = 0;  // width of a request row
  uint32_t intermediate_size = 0;
  uint32_t out_size = 0;  // width of a reply row
  Activation activation = Activation::kSilu;
  GateKind gate = GateKind::kGated;
  bool has_gate_up_bias = false;
  bool has_down_bias = false;
  float alpha = 1.0f;                 // the slope inside kClampedSwiglu's sigmoid
  float up_offset = 0.0f;             // what kClampedSwiglu adds to u (1 in gpt-oss)
  float gate_max = __builtin_inff();  // g = min(g, gate_max) before the activation
  float up_limit = __builtin_inff();  // u = clamp(u, -up_limit, up_limit)

  // Errors: kUnsupported naming the field, its value and its bound.
  Status validate() const;
  bool operator==(const FfnSpec&) const = default;
};

}  // namespace dflash::compute
