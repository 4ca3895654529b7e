// The readable twins of the row operators: each formula of operators/ on one row of float32 values,
// one element at a time. Kernels are held to their bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "compute/experts/ffn_spec.h"
#include "compute/operators/norm.h"
#include "compute/operators/rotary.h"
#include "compute/operators/router.h"

namespace dflash::compute {

// Weight and bias are [width], or null where there is none.
std::vector<float> reference_norm(const NormForm& form, std::span<const float> x,
                                  const float* weight, const float* bias);

// Rotates a row [num_heads, head_dim]; what is beside the rotated values stays.
std::vector<float> reference_rotate(const RotaryForm& form, std::span<const float> row,
                                    const float* cos, const float* sin);

struct RoutedRow {
  std::vector<uint32_t> topk_ids;
  std::vector<float> topk_weights;
};
// Bias and scales are [num_experts], or null where there are none.
RoutedRow reference_route(const RouterForm& form, std::span<const float> logits, const float* bias,
                          const float* expert_scales);

// `g` is not used where the spec has no gate.
std::vector<float> reference_gate(const FfnSpec& spec, std::span<const float> g,
                                  std::span<const float> u);

// base + x * s; base and gate may be null.
std::vector<float> reference_add_scaled(std::span<const float> x, const float* base,
                                        const float* gate, float scale);

int64_t reference_argmax(std::span<const float> values);

}  // namespace dflash::compute
