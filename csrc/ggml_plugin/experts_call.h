// One call of a layer's experts for what was recognised in a graph.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "ggml_plugin/plan.h"
#include "ggml_plugin/recognize.h"

namespace dflash::ggml_plugin {

// Memory of one backend, which llama.cpp makes per context and computes with on one thread at a
// time. It grows to the largest batch.
struct Scratch {
  std::vector<int32_t> ids;    // [num_tokens, top_k]
  std::vector<float> weights;  // [num_tokens, top_k]
  std::vector<float> sums;     // [num_tokens, out_size], where the result cannot be written at once
};

// Computes `experts` with the workers and writes its result. Blocks until the call's own deadline
// at most. Returns "" or the sentence that says why it failed.
std::string call_experts(const Plan& plan, const ExpertsInGraph& experts, Scratch& scratch);

}  // namespace dflash::ggml_plugin
