// Recognises the experts of a layer in a graph of ggml. llama.cpp builds them with one function for
// all architectures (build_moe_ffn), out of these nodes:
//
//   up      = MUL_MAT_ID(up weights, x, ids)      gate likewise, or one product whose VIEWs are
//   both up      = MUL(up, GET_ROWS(REPEAT(RESHAPE(scale)), ids))     where there are scales up =
//   ADD_ID(up, bias, ids)                              where there are biases h       = GLU(gate,
//   up), UNARY(up) or SQR(UNARY(up)) experts = MUL_MAT_ID(down weights, h, ids), scale and bias
//   likewise, MUL(experts, weights) result  = ADD(ADD(VIEW(experts, 0), VIEW(experts, 1)), ...), or
//   CONT(VIEW(experts, 0))
//
// All functions are pure; they read only the tensors' descriptions, never their data.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ggml_plugin/plan.h"

struct ggml_cgraph;
struct ggml_backend_buffer_type;

namespace dflash::ggml_plugin {

// How a model's own tensors are told from others: they lie in buffers of this type and bear names
// of the plan.
struct Scope {
  const Plan* plan;
  const ggml_backend_buffer_type* weights;
};

// The plan's tensor that `tensor` is, or null.
const Tensor* planned(const Scope& scope, const ggml_tensor* tensor);

// Whether a node is computed by the workers: exactly what hangs on our weights. A scheduler asks
// for each node of a graph and each backend, so this looks at a few sources and allocates nothing.
bool hangs_on_weights(const Scope& scope, const ggml_tensor* node);

// A layer's experts in a graph. Every tensor belongs to the graph.
struct ExpertsInGraph {
  const Layer* layer = nullptr;
  const ggml_tensor* hidden_states = nullptr;  // f32 [in_size, 1, num_tokens], rows may be strided
  // i32 [at least top_k, num_tokens], strided; columns from top_k on are summed up by nobody.
  const ggml_tensor* ids = nullptr;
  const ggml_tensor* weights = nullptr;  // f32 [1, as ids, num_tokens], strided
  ggml_tensor* result = nullptr;         // f32 [out_size, num_tokens]
  uint32_t top_k = 0;  // how many slots are added; fewer than ids has in a warm-up
  uint32_t num_tokens = 0;
  std::vector<const ggml_tensor*> tensors;  // the model's, each once
};

// Finds the next layer's experts in the nodes of `graph` from *position on, which moves behind
// them. Returns false at the end of the graph, and with `error` (otherwise left empty) where a node
// is not part of a layer's experts as the plan has them.
bool next_experts(const Scope& scope, const ggml_cgraph& graph, int* position,
                  ExpertsInGraph* found, std::string* error);

}  // namespace dflash::ggml_plugin
