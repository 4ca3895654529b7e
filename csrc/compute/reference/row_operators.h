// The readable twins of the row operators: each formula of operators/ on one row of float32 values,
// one element at a time. Kernels are held to their bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "compute/experts/ffn_spec.h"
#include "compute/operators/attention.h"
#include "compute/operators/attention_plan.h"
#include "compute/operators/linear.h"
#include "compute/operators/norm.h"
#include "compute/operators/paged_kv.h"
#include "compute/operators/rotary.h"
#include "compute/operators/router.h"
#include "compute/operators/rows.h"

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

// The readable twin of paged attention: it does what operators/attention.h says, one number after
// another.

// Writes the attention of each row of `queries` [num_rows, num_heads * key_size] to `out`
// [num_rows, num_heads * value_size]. Query head h reads kv head h / (num_heads / num_kv_heads).
// The arguments must fit each other, as paged_attention (cpu/paged_attention.h) checks them; what
// exceeds the range of out's dtype becomes infinite.
void reference_attention(const KvView& kv, const AttentionPlan& plan, const AttentionForm& form,
                         uint32_t num_heads, const RowsView& queries, const RowsTarget& out);

// The readable twin of the packed linear layer (operators/linear.h).

// Computes out [num_rows, outputs of all parts] from rows and, where there is one, a residual, as
// operators/linear.h has it; the class of a part is part_numerics'. Errors: those of check_parts,
// check_linear_rows and class_matrix, and kRange for the first value that is infinite only in the
// dtype of `out`.
Status reference_linear(std::span<const LinearPart> parts, NumericsClass numerics,
                        const RowsView& rows, const RowsTarget& out,
                        const RowsView* residual = nullptr);

}  // namespace dflash::compute
