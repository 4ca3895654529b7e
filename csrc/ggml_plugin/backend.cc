// Computes graphs: recognises the experts of each layer and calls the workers.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/backend.h"

#include <new>

#include "ggml_plugin/experts_call.h"
#include "ggml_plugin/notice.h"
#include "ggml_plugin/recognize.h"

namespace dflash::ggml_plugin {
namespace {

// ggml tells backends apart by these bytes; they are random.
ggml_guid kBackendGuid = {0x6b, 0x1f, 0xa4, 0x0e, 0x93, 0x5d, 0x4c, 0x72,
                          0x8e, 0xd1, 0x37, 0xc8, 0x50, 0xfa, 0x29, 0xb6};
ggml_guid kWeightBackendGuid = {0x24, 0xc9, 0x7e, 0x58, 0xb3, 0x0a, 0x46, 0xdd,
                                0x91, 0x6f, 0xe5, 0x12, 0x8c, 0x4b, 0xf7, 0x30};

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
