// Computes calls with the reference, at once.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/standin_client.h"

#include <doctest/doctest.h>

#include <cstring>

#include "compute/reference/reference.h"

using dflash::compute::ExpertWeights;
using dflash::compute::MatrixView;
using dflash::ggml_plugin::ExpertsModel;
using dflash::ggml_plugin::FileTensor;

struct dflash_moe_call {
  dflash_moe_client* client;
  int status;
  std::string text;
};

namespace {

thread_local std::string error_text;

int fail(int status, const std::string& text) {
  error_text = text;
  return status;
}

const std::byte* bytes(const float* values) { return reinterpret_cast<const std::byte*>(values); }

MatrixView view(const float* values, uint32_t outputs, uint32_t inputs) {
  MatrixView matrix;
  matrix.data = bytes(values);
  matrix.outputs = outputs;
  matrix.inputs = inputs;
  matrix.output_stride = inputs;
  matrix.input_stride = 1;
  return matrix;
}

}  // namespace

void dflash_moe_client::hold(const ExpertsModel& model) {
  const auto& o = model.options();
  auto layer = std::make_unique<HeldLayer>();
  layer->facts = model.facts();
  const bool is_gated = o.gate != dflash::compute::GateKind::kNone;
  const std::string first = o.is_fused ? "gate_up" : "up";
  layer->up = model.held(first);
  if (is_gated && !o.is_fused) layer->gate = model.held("gate");
  layer->down = model.held("down");
  layer->experts = dflash::compute::make_reference_layer(model.spec(), o.num_experts);
  dflash::compute::YieldingProgress progress;
  const size_t mid = o.intermediate_size, first_rows = o.is_fused ? 2 * mid : mid;
  for (uint32_t expert = 0; expert < o.num_experts; ++expert) {
    const float* up_rows = layer->up.data() + expert * first_rows * o.in_size;
    ExpertWeights weights;
    weights.up = view(up_rows + (o.is_fused ? mid * o.in_size : 0), o.intermediate_size, o.in_size);
    if (is_gated) {
      weights.gate = view(o.is_fused ? up_rows : layer->gate.data() + expert * mid * o.in_size,
                          o.intermediate_size, o.in_size);
    }
    weights.down =
        view(layer->down.data() + expert * o.out_size * mid, o.out_size, o.intermediate_size);
    const auto bias = [&](const std::string& part, size_t rows, size_t from, uint32_t count) {
      return dflash::compute::VectorView{
          .data = bytes(model.tensor(part + ".bias").values.data() + expert * rows + from),
          .dtype = dflash::Dtype::kF32,
          .count = count,
          .stride = 1};
    };
    if (o.has_gate_up_bias) {
      weights.up_bias = bias(first, first_rows, o.is_fused ? mid : 0, o.intermediate_size);
      if (is_gated)
        weights.gate_bias = bias(o.is_fused ? first : "gate", first_rows, 0, o.intermediate_size);
    }
    if (o.has_down_bias) weights.down_bias = bias("down", o.out_size, 0, o.out_size);
    const auto loaded = layer->experts->load_expert(expert, weights, progress);
    REQUIRE_MESSAGE(loaded.ok(), loaded.error().message);
  }
  layers.push_back(std::move(layer));
  for (const FileTensor& tensor : model.tensors()) {
    HeldTensor held = {
        .facts = {.struct_bytes = sizeof(dflash_moe_tensor),
                  .name = tensor.name.c_str(),
                  .layer = o.layer,
                  .ggml_type = 0,
                  .num_extents = static_cast<uint32_t>(tensor.extents.size()),
                  .extents = {1, 1, 1, 1},
                  .num_bytes = tensor.values.size() * sizeof(float)},
        .tensor = &tensor
    };
    for (size_t i = 0; i < tensor.extents.size(); ++i)
      held.facts.extents[i] = static_cast<uint64_t>(tensor.extents[i]);
    tensors.push_back(held);
  }
}

void dflash_moe_client::fail_with(int status, const std::string& text) {
  const std::lock_guard lock(mutex);
  failure = status;
  failure_text = text;
}

extern "C" {

uint32_t dflash_moe_interface_version(void) { return DFLASH_MOE_INTERFACE_VERSION; }

dflash_moe_client* dflash_moe_open(const char*) {
  error_text = "the tests make their clients themselves";
  return nullptr;
}

void dflash_moe_close(dflash_moe_client*) {}

const char* dflash_moe_architecture(const dflash_moe_client*) { return "test"; }

uint32_t dflash_moe_num_layers(const dflash_moe_client* client) {
  return static_cast<uint32_t>(client->layers.size());
}

int dflash_moe_layer_at(const dflash_moe_client* client, uint32_t position,
                        dflash_moe_layer* layer) {
  *layer = client->layers[position]->facts;
  return DFLASH_MOE_OK;
}

uint32_t dflash_moe_num_tensors(const dflash_moe_client* client) {
  return static_cast<uint32_t>(client->tensors.size());
}

int dflash_moe_tensor_at(const dflash_moe_client* client, uint32_t position,
                         dflash_moe_tensor* tensor) {
  *tensor = client->tensors[position].facts;
  return DFLASH_MOE_OK;
}

int dflash_moe_check_tensor(dflash_moe_client* client, const char* name, const void* data,
                            size_t num_bytes) {
  for (const auto& held : client->tensors) {
    if (held.tensor->name != name) continue;
    const bool is_same = num_bytes == held.facts.num_bytes &&
                         std::memcmp(data, held.tensor->values.data(), num_bytes) == 0;
    if (is_same) return client->is_stub ? DFLASH_MOE_STUB : DFLASH_MOE_OK;
    return fail(DFLASH_MOE_MISMATCH, "its bytes differ");
  }
  return fail(DFLASH_MOE_INVALID, "there is no such tensor");
}

void dflash_moe_report_tensor(dflash_moe_client* client, const char* name, const char* reason) {
  const std::lock_guard lock(client->mutex);
  client->reports.emplace_back(name, reason ? reason : "");
}

dflash_moe_call* dflash_moe_submit(dflash_moe_client* client, const dflash_moe_batch* batch,
                                   int* status) {
  const std::lock_guard lock(client->mutex);
  ++client->num_calls;
  if (client->failure != DFLASH_MOE_OK && client->fails_at_submit) {
    *status = fail(client->failure, client->failure_text);
    return nullptr;
  }
  ++client->num_open_calls;
  auto* call = new dflash_moe_call{client, client->failure, client->failure_text};
  if (call->status != DFLASH_MOE_OK) return call;
  client->last_top_k = batch->top_k;
  client->last_output = batch->output;
  const dflash_moe_client::HeldLayer* layer = nullptr;
  for (const auto& held : client->layers)
    if (held->facts.layer == batch->layer) layer = held.get();
  REQUIRE(layer);
  const size_t in = layer->facts.in_size, out = layer->facts.out_size;
  // Row after row, each written before the next is read, as answers of workers may arrive.
  dflash::compute::YieldingProgress progress;
  for (uint32_t row = 0; row < batch->num_tokens; ++row) {
    const auto* from =
        reinterpret_cast<const std::byte*>(batch->hidden_states) +
        row * (batch->hidden_states_stride ? batch->hidden_states_stride : in * sizeof(float));
    std::vector<uint16_t> ids;
    std::vector<float> weights;
    for (size_t slot = row * batch->top_k; slot < (row + 1) * batch->top_k; ++slot) {
      ids.push_back(static_cast<uint16_t>(batch->topk_ids[slot]));
      weights.push_back(batch->topk_weights[slot]);
    }
    const uint16_t count = static_cast<uint16_t>(batch->top_k);
    std::vector<float> sums(out);
    const auto done = layer->experts->forward(
        {
            .rows = from,
            .row_dtype = dflash::Dtype::kF32,
            .num_rows = 1,
            .row_counts = {&count, 1},
            .local_expert_ids = ids,
            .weights = weights,
            .reply = reinterpret_cast<std::byte*>(sums.data()),
            .reply_dtype = dflash::Dtype::kF32
    },
        progress);
    REQUIRE_MESSAGE(done.ok(), done.error().message);
    std::memcpy(batch->output + row * out, sums.data(), out * sizeof(float));
  }
  return call;
}

int dflash_moe_wait(dflash_moe_call* call, int64_t) {
  if (call->status != DFLASH_MOE_OK) error_text = call->text;
  return call->status;
}

void dflash_moe_abandon(dflash_moe_call* call) {
  error_text = "abandon has been called since";
  const std::lock_guard lock(call->client->mutex);
  --call->client->num_open_calls;
  delete call;
}

const char* dflash_moe_error(void) { return error_text.c_str(); }
int dflash_moe_count(dflash_moe_client*, dflash_moe_counters*) { return DFLASH_MOE_FAILED; }
}
