// Computes graphs: recognises the experts of each layer and calls the workers. A call packs ids and
// weights, submits, waits, and puts the sums where the graph wants them.
// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "ggml_plugin/ggml_headers.h"
#include "ggml_plugin/notice.h"
#include "ggml_plugin/recognize.h"
#include "ggml_plugin/registration.h"
#include "ggml_plugin/weight_buffer.h"

namespace dflash::ggml_plugin {
namespace {

// ggml tells backends apart by these bytes; they are random.
ggml_guid kBackendGuid = {0x6b, 0x1f, 0xa4, 0x0e, 0x93, 0x5d, 0x4c, 0x72,
                          0x8e, 0xd1, 0x37, 0xc8, 0x50, 0xfa, 0x29, 0xb6};
ggml_guid kWeightBackendGuid = {0x24, 0xc9, 0x7e, 0x58, 0xb3, 0x0a, 0x46, 0xdd,
                                0x91, 0x6f, 0xe5, 0x12, 0x8c, 0x4b, 0xf7, 0x30};

// Memory of one backend, which llama.cpp makes per context and computes with on one thread at a
// time. It grows to the largest batch.
struct Scratch {
  std::vector<int32_t> ids;    // [num_tokens, top_k]
  std::vector<float> weights;  // [num_tokens, top_k]
  std::vector<float> sums;     // [num_tokens, out_size], where the result cannot be written at once
};

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

// Computes `experts` with the workers and writes its result. Blocks until the call's own deadline
// at most. Returns "" or the sentence that says why it failed.
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

struct Context {
  Registration& registration;
  Scratch scratch;
};

Context& of(ggml_backend_t backend) { return *static_cast<Context*>(backend->context); }

const char* get_name(ggml_backend_t) { return "DFLASH_MOE"; }
const char* get_weight_name(ggml_backend_t) { return "DFLASH_MOE_W"; }

void free_backend(ggml_backend_t backend) {
  delete static_cast<Context*>(backend->context);
  delete backend;
}

ggml_status fail(const std::string& reason) {
  say_once(reason);
  return GGML_STATUS_FAILED;
}

ggml_status compute(Context& context, const ggml_cgraph& graph) {
  const Registration& registration = context.registration;
  std::string error;
  ExpertsInGraph experts;
  int position = 0;
  while (next_experts(registration.scope(), graph, &position, &experts, &error)) {
    error = call_experts(registration.plan(), experts, context.scratch);
    if (!error.empty()) break;
  }
  return error.empty() ? GGML_STATUS_SUCCESS : fail(error);
}

ggml_status graph_compute(ggml_backend_t backend, ggml_cgraph* graph) {
  Context& context = of(backend);
  try {
    return compute(context, *graph);
  } catch (const std::bad_alloc&) {
    return GGML_STATUS_ALLOC_FAILED;  // a sentence would need memory as well
  }
}

ggml_status refuse_graph(ggml_backend_t, ggml_cgraph*) {
  return fail("the device DFLASH_MOE_W holds weights and computes nothing; use DFLASH_MOE");
}

ggml_backend_t make(ggml_guid_t guid, ggml_backend_dev_t device, Context* context) {
  auto* backend = context ? new (std::nothrow) ggml_backend{} : nullptr;
  if (!backend) {
    delete context;
    return nullptr;
  }
  // Slots that stay null are optional: nothing here is asynchronous.
  backend->guid = guid;
  backend->iface.free = free_backend;
  backend->device = device;
  backend->context = context;
  return backend;
}

}  // namespace

ggml_backend_t make_backend(Registration& registration) {
  ggml_backend_t backend =
      make(&kBackendGuid, registration.device(), new (std::nothrow) Context{registration, {}});
  if (!backend) return nullptr;
  backend->iface.get_name = get_name;
  backend->iface.graph_compute = graph_compute;
  return backend;
}

ggml_backend_t make_weight_backend(Registration& registration) {
  ggml_backend_t backend = make(&kWeightBackendGuid, registration.weight_device(),
                                new (std::nothrow) Context{registration, {}});
  if (!backend) return nullptr;
  backend->iface.get_name = get_weight_name;
  backend->iface.graph_compute = refuse_graph;
  return backend;
}

}  // namespace dflash::ggml_plugin
