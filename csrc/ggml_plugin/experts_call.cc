// Packs ids and weights, submits, waits, and puts the sums where the graph wants them.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/experts_call.h"

#include <cstring>

#include "ggml_plugin/ggml_headers.h"
#include "ggml_plugin/weight_buffer.h"

namespace dflash::ggml_plugin {
namespace {

const char* at(const ggml_tensor* tensor, size_t offset) {
  return static_cast<const char*>(tensor->data) + offset;
}

// The bytes from the first to the last element of a tensor whose rows ascend.
struct Range {
  uintptr_t begin, end;
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
};

Range range_of(const ggml_tensor* tensor, size_t row_bytes, size_t stride, uint32_t num_rows) {
  const auto begin = reinterpret_cast<uintptr_t>(tensor->data);
  return {begin, begin + (num_rows - 1) * stride + row_bytes};
}

std::string pack(const ExpertsInGraph& experts, Scratch& scratch) {
  const ggml_tensor *ids = experts.ids, *weights = experts.weights;
  const size_t num_pairs = size_t{experts.num_tokens} * experts.top_k;
  scratch.ids.resize(num_pairs);
  scratch.weights.resize(num_pairs);
  size_t pair = 0;
  for (size_t token = 0; token < experts.num_tokens; ++token) {
    for (size_t slot = 0; slot < experts.top_k; ++slot, ++pair) {
      int32_t id;
      std::memcpy(&id, at(ids, token * ids->nb[1] + slot * ids->nb[0]), sizeof id);
      // ggml would stop the program here; num_experts asks for nothing in our calls.
      if (id < 0 || static_cast<uint32_t>(id) >= experts.layer->facts.num_experts)
        return "the program chose expert " + std::to_string(id) + " of " +
               std::to_string(experts.layer->facts.num_experts);
      scratch.ids[pair] = id;
      std::memcpy(&scratch.weights[pair],
                  at(weights, token * weights->nb[2] + slot * weights->nb[1]), sizeof(float));
    }
  }
  return {};
}

}  // namespace

std::string call_experts(const Plan& plan, const ExpertsInGraph& experts, Scratch& scratch) {
  for (const ggml_tensor* tensor : experts.tensors) {
    std::string reason = why_unverified(plan, *tensor);
    if (!reason.empty())
      return "layer " + std::to_string(experts.layer->facts.layer) +
             " cannot be computed, because its weights are not those of the workers: " + reason;
  }
  if (experts.num_tokens == 0) return {};
  if (std::string error = pack(experts, scratch); !error.empty()) return error;

  const dflash_moe_layer& facts = experts.layer->facts;
  const ggml_tensor* x = experts.hidden_states;
  ggml_tensor* result = experts.result;
  const size_t result_row = facts.out_size * sizeof(float);
  // Where inputs were copied from another device, ggml may give their memory to results of the same
  // graph: it believes that x is done with when gate and up are. The workers' sums arrive while x
  // is still being sent to others, so they go elsewhere then. ids and weights are packed already.
  const bool is_direct =
      (experts.num_tokens == 1 || result->nb[1] == result_row) &&
      !range_of(result, result_row, result->nb[1], experts.num_tokens)
           .overlaps(range_of(x, facts.in_size * sizeof(float), x->nb[2], experts.num_tokens));
  if (!is_direct) scratch.sums.resize(size_t{experts.num_tokens} * facts.out_size);

  dflash_moe_batch batch = {};
  batch.struct_bytes = sizeof batch;
  batch.layer = facts.layer;
  batch.num_tokens = experts.num_tokens;
  batch.top_k = experts.top_k;
  batch.hidden_states = static_cast<const float*>(x->data);
  batch.hidden_states_stride = x->nb[2];
  batch.topk_ids = scratch.ids.data();
  batch.topk_weights = scratch.weights.data();
  batch.output = is_direct ? static_cast<float*>(result->data) : scratch.sums.data();
  int status = DFLASH_MOE_OK;
  dflash_moe_call* call = dflash_moe_submit(plan.client(), &batch, &status);
  if (!call) return dflash_moe_error();
  status = dflash_moe_wait(call, -1);  // until the call's own deadline
  std::string error;
  if (status != DFLASH_MOE_OK) error = dflash_moe_error();  // before the next function changes it
  dflash_moe_abandon(call);
  if (status != DFLASH_MOE_OK) return error.empty() ? "a call of the workers failed" : error;
  if (!is_direct) {
    for (size_t token = 0; token < experts.num_tokens; ++token)
      std::memcpy(static_cast<char*>(result->data) + token * result->nb[1],
                  scratch.sums.data() + token * facts.out_size, result_row);
  }
  return {};
}

}  // namespace dflash::ggml_plugin
