// The row operators of a host's forward pass: norms, rotary embedding, routing, gates, argmax. A
// row's bits depend on that row and on the weights: not on its company, on threads or on the
// instruction set. The formulas are in operators/.
//
// Every function takes rows in float32, float16 or bfloat16, computes in float32 and rounds once,
// to the nearest even value of the output's dtype. A finite value beyond that dtype becomes
// infinity, as in torch, so that one row never fails the others. Output rows may be input rows
// themselves, where dtype and stride are equal; other overlaps are not allowed. Addresses and
// strides are multiples of the dtype's size. Rows are split over the pool only where there are
// enough of them to pay for waking a thread. Any thread may call, but for one that runs a task of
// the pool. `isa` is a supported set, whose kernels are taken.
// Errors: kInvalidArgument naming what cannot be, before anything is written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/thread_pool.h"
#include "compute/experts/ffn_spec.h"
#include "compute/operators/norm.h"
#include "compute/operators/rotary.h"
#include "compute/operators/router.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

struct NormArgs {
  NormForm form = {};
  uint32_t width = 0;
  RowsView rows = {};             // [num_rows, width]
  RowsView residual = {};         // [num_rows, width], added to rows; data null: none
  RowsTarget sum = {};            // [num_rows, width], rows + residual; data null: not kept
  const float* weight = nullptr;  // [width]; null: all 1
  const float* bias = nullptr;    // [width]; null: none
  RowsTarget out = {};            // [num_rows, width]
};
Status normalize(ThreadPool& pool, Isa isa, const NormArgs& args);

struct RotateArgs {
  RotaryForm form = {};
  RowsView rows = {};           // [num_rows, num_heads, head_dim], heads of a row adjacent
  RowsView cos = {}, sin = {};  // [num_rows, rotary_dim or half of it] float32
  RowsTarget out = {};          // as rows
};
Status rotate(ThreadPool& pool, Isa isa, const RotateArgs& args);

enum class IdType : uint8_t { kInt32, kInt64 };

struct RouteArgs {
  RouterForm form = {};
  RowsView logits = {};                  // [num_rows, num_experts]
  const float* bias = nullptr;           // [num_experts], for the choice only; null: none
  const float* expert_scales = nullptr;  // [num_experts]; null: none
  std::byte* topk_ids = nullptr;         // [num_rows, top_k], contiguous
  IdType id_type = IdType::kInt64;
  float* topk_weights = nullptr;  // [num_rows, top_k], contiguous
};
Status route(ThreadPool& pool, Isa isa, const RouteArgs& args);

struct GateArgs {
  FfnSpec spec = {};  // its activation, gate and their constants; sizes are not looked at
  uint32_t width = 0;
  RowsView gate = {};   // [num_rows, width]; data null where the spec has no gate
  RowsView up = {};     // [num_rows, width]
  RowsTarget out = {};  // [num_rows, width]
};
Status apply_gate(ThreadPool& pool, Isa isa, const GateArgs& args);

struct AddScaledArgs {
  uint32_t width = 0;
  RowsView rows = {};   // [num_rows, width]
  RowsView base = {};   // [num_rows, width]; data null: none
  RowsView gate = {};   // [num_rows, 1], rows are scaled by its sigmoid; data null: by `scale`
  float scale = 1.0f;   // what rows are scaled by where there is no gate
  RowsTarget out = {};  // [num_rows, width], base + rows * scale
};
Status add_scaled(ThreadPool& pool, Isa isa, const AddScaledArgs& args);

// Writes the place of each row's largest value (operators/argmax.h) to places[num_rows].
Status argmax(ThreadPool& pool, Isa isa, uint32_t width, const RowsView& rows, int64_t* places);

}  // namespace dflash::compute
