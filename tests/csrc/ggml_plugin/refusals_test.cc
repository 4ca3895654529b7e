// What the plug-in does not do: it says no where llama.cpp can still decide otherwise, and fails
// with a sentence where it cannot. It never returns wrong numbers.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "ggml_plugin/fake_host.h"

namespace dflash::ggml_plugin {
namespace {

using compute::Activation;
using compute::GateKind;

// Computes what the scheduler would give to the device, which has to fail with a sentence about
// `text`, and call nobody.
void check_fails(FakeHost& host, FakeGraph& graph, std::vector<ggml_tensor*> nodes,
                 const std::string& text) {
  CapturedErrors errors;
  const int num_calls = host.client().num_calls;
  CHECK(compute(host.backend(), graph.part(std::move(nodes))) == GGML_STATUS_FAILED);
  CHECK(host.client().num_calls == num_calls);
  const std::string said = errors.text();
  INFO("said: ", said);
  CHECK(said.find(text) != std::string::npos);
}

void check_fails(FakeHost& host, ExpertsGraph& experts, const std::string& text) {
  check_fails(host, experts.graph, nodes_for(host.device(), experts.graph), text);
}

std::string reason_for(const FakeHost& host, dflash_moe_client& client, const std::string& name) {
  static_cast<void>(host);
  for (auto report = client.reports.rbegin(); report != client.reports.rend(); ++report)
    if (report->first == name) return report->second.empty() ? "taken" : report->second;
  return "never reported";
}

TEST_CASE("a tensor of another name, type or shape is kept by the program, and reported") {
  const ExpertsModel model({}), other({.layer = 4}), wider({.in_size = 48});
  FakeHost host(model);
  const CapturedErrors errors;
  for (const FileTensor& tensor : other.tensors()) {
    CHECK_FALSE(host.is_asked_for(tensor));
    CHECK(reason_for(host, host.client(), tensor.name).find("no tensor of this name") !=
          std::string::npos);
  }
  const FileTensor& up = model.tensor("up.weight");
  CHECK_FALSE(host.is_asked_for(up, GGML_TYPE_I32));
  CHECK(reason_for(host, host.client(), up.name).find("type") != std::string::npos);
  CHECK_FALSE(host.is_asked_for(wider.tensor("up.weight")));
  CHECK(reason_for(host, host.client(), up.name).find("[48, 16, 6, 1]") != std::string::npos);
  CHECK(host.is_asked_for(up));
  // The rest of a model is asked for, too; it is no news to anybody.
  const size_t num_reports = host.client().reports.size();
  CHECK_FALSE(host.is_asked_for({
      "blk.3.attn_q.weight", {24, 24},
       {}
  }));
  CHECK(host.client().reports.size() == num_reports);
}

TEST_CASE("a layer whose plan is not whole is kept as a whole") {
  const ExpertsModel model({.has_down_bias = true});
  dflash_moe_client client;
  client.hold(model);
  std::erase_if(client.tensors,
                [](auto& held) { return held.tensor->name.ends_with("gate_exps.weight"); });
  Plan plan;
  std::string error;
  REQUIRE(plan.read(&client, &error));
  CHECK_FALSE(plan.layers().front().reason.empty());
}

TEST_CASE("a tensor that was forced into the buffers fails the loading") {
  const ExpertsModel model({}), other({.layer = 4});
  FakeHost host(model);
  ggml_backend_buffer_type_t type =
      host.weight_device()->iface.get_buffer_type(host.weight_device());
  ggml_backend_buffer_t buffer = type->iface.alloc_buffer(type, 1 << 16);
  FakeGraph tensors;
  const CapturedErrors errors;
  ggml_tensor* tensor = tensors.leaf(other.tensors()[0].name, {24, 16, 6, 1});
  tensor->buffer = buffer;
  CHECK(buffer->iface.init_tensor(buffer, tensor) == GGML_STATUS_FAILED);
  CHECK(reason_for(host, host.client(), tensor->name).find("no tensor") != std::string::npos);
  // -fit has made a graph with it before; a scheduler wants somebody to support it.
  CHECK(host.device()->iface.supports_op(host.device(), tensor));
  // ggml initialises views of tensors that lie here, under names of their own.
  ggml_tensor* view = tensors.reshape(tensor, {1, 6, 1, 1});
  view->buffer = buffer;
  CHECK(buffer->iface.init_tensor(buffer, view) == GGML_STATUS_SUCCESS);
  buffer->iface.free_buffer(buffer);
  delete buffer;
}

TEST_CASE("verified tensors are reported once each, and their bytes are nowhere") {
  const ExpertsModel model({.has_gate_up_bias = true});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  CHECK(host.client().reports.size() == model.tensors().size());
  for (const FileTensor& tensor : model.tensors())
    CHECK(reason_for(host, host.client(), tensor.name) == "taken");
  // Reading gives NaN, with a sentence.
  CapturedErrors errors;
  float value = 1.0f;
  const ggml_tensor* up = loaded.tensor("up.weight");
  loaded.buffer()->iface.get_tensor(loaded.buffer(), up, &value, 0, sizeof value);
  CHECK(value != value);
  CHECK(errors.text().find("ffn_up_exps.weight") != std::string::npos);
  CHECK_FALSE(loaded.buffer()->buft->iface.is_host(loaded.buffer()->buft));
}

TEST_CASE("a second model with other bytes fails, and the first goes on") {
  const ExpertsModel model({}), other({.seed = 5});
  FakeHost host(model);
  const LoadedModel first(host, model);
  CapturedErrors errors;
  const LoadedModel second(host, model, &other);
  CHECK(reason_for(host, host.client(), model.tensor("up.weight").name) == "its bytes differ");
  CHECK(errors.text().find("give both the same file") != std::string::npos);
  ExpertsGraph wrong(second);
  wrong.build();
  check_fails(host, wrong, "its weights are not those of the workers");
  ExpertsGraph right(first);
  right.build();
  CHECK(compute(host.backend(), right.graph.all()) == GGML_STATUS_SUCCESS);
  right.check_result();
}

TEST_CASE("tensors that were written in parts, overwritten or never written fail") {
  const ExpertsModel model({});
  FakeHost host(model);
  const CapturedErrors errors;
  for (int way = 0; way < 4; ++way) {
    CAPTURE(way);
    const LoadedModel loaded(host, model);
    ggml_tensor* down = loaded.tensor("down.weight");
    const auto& table = loaded.buffer()->iface;
    const float* values = model.tensor("down.weight").values.data();
    if (way == 0) table.set_tensor(loaded.buffer(), down, values, 0, 64);
    if (way == 1) table.set_tensor(loaded.buffer(), down, values, 64, 64);
    if (way == 2) table.memset_tensor(loaded.buffer(), down, 0, 0, 64);
    if (way == 3) table.cpy_tensor(loaded.buffer(), down, down);
    ExpertsGraph experts(loaded);
    experts.build();
    CHECK(compute(host.backend(), experts.graph.all()) == GGML_STATUS_FAILED);
  }
  CHECK(host.client().num_calls == 0);
}

TEST_CASE("-fit plans without these devices and measures with empty buffers") {
  const ExpertsModel model({});
  FakeHost host(model);
  size_t free = 1, total = 1;
  for (ggml_backend_dev_t device : {host.weight_device(), host.device()}) {
    device->iface.get_memory(device, &free, &total);
    CHECK(free == 0);
    CHECK(total == 0);
    CHECK(device->iface.get_type(device) == GGML_BACKEND_DEVICE_TYPE_ACCEL);
  }
  const LoadedModel loaded(host, model);
  ggml_backend_buffer empty = {};
  empty.buft = loaded.buffer()->buft;
  ExpertsGraph experts(loaded);
  for (const char* name : {"up.weight", "gate.weight", "down.weight"})
    loaded.tensor(name)->buffer = &empty;
  experts.build();
  CHECK(host.device()->iface.supports_op(host.device(), experts.graph.nodes()[2]));
  check_fails(host, experts, "was never loaded");
}

TEST_CASE("an eval callback asks node by node") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  CapturedErrors errors;
  for (ggml_tensor* node : experts.graph.nodes()) {
    const bool is_view = node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE;
    CHECK(compute(host.backend(), experts.graph.part({node})) ==
          (is_view ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED));
  }
  CHECK(errors.text().find("eval callbacks") != std::string::npos);
  CHECK(host.client().num_calls == 0);
}

TEST_CASE("a LoRA adapter on experts breaks the layer into parts") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  for (const bool is_on_down : {false, true}) {
    ExpertsGraph experts(loaded);
    FakeGraph& graph = experts.graph;
    const auto adapted = [&](ggml_tensor* product, ggml_tensor* x) {
      ggml_tensor* a = graph.leaf("lora_a", {x->ne[0], 4, 6, 1});
      ggml_tensor* b = graph.leaf("lora_b", {4, product->ne[0], 6, 1});
      ggml_tensor* delta = graph.mul_mat_id(b, graph.mul_mat_id(a, x, experts.ids), experts.ids);
      return graph.binary(GGML_OP_ADD, product, graph.same(GGML_OP_SCALE, delta));
    };
    if (!is_on_down) {
      experts.up = adapted(experts.product("up", experts.x), experts.x);
      experts.build();
    } else {
      ggml_tensor* h = graph.glu(GGML_GLU_OP_SWIGLU, experts.product("gate", experts.x),
                                 experts.product("up", experts.x));
      graph.binary(GGML_OP_MUL, adapted(experts.product("down", h), h), experts.weights);
    }
    check_fails(host, experts, "LoRA adapters for experts");
  }
}

TEST_CASE("another activation, another limit, another formula") {
  const ExpertsModel model({}), relu({.activation = Activation::kRelu}),
      limited({.gate_max = 0.5f, .up_limit = 0.5f}), ungated({.gate = GateKind::kNone});
  const auto check_other = [](const ExpertsModel& held, const ExpertsModel& used,
                              const std::string& text) {
    FakeHost host(held);
    const LoadedModel loaded(host, used, &held);
    ExpertsGraph experts(loaded);
    experts.build();
    check_fails(host, experts, text);
  };
  check_other(model, relu, "its activation is not that of the workers");
  check_other(limited, model, "its activation is not that of the workers");
  check_other(model, limited, "its activation is not that of the workers");
}

TEST_CASE("weights before the experts, no weights, gate and up exchanged") {
  const ExpertsModel model({.top_k = 2});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  {
    // As llama4 has it: the input is repeated and weighted, and the sum is over plain products.
    ExpertsGraph experts(loaded);
    ggml_tensor* h = experts.graph.glu(GGML_GLU_OP_SWIGLU, experts.product("gate", experts.x),
                                       experts.product("up", experts.x));
    ggml_tensor* down = experts.product("down", h);
    ggml_tensor* first = experts.graph.view(down, {20, 3, 1, 1}, down->nb[2], down->nb[3], 0);
    ggml_tensor* second =
        experts.graph.view(down, {20, 3, 1, 1}, down->nb[2], down->nb[3], down->nb[1]);
    experts.graph.binary(GGML_OP_ADD, first, second);
    check_fails(host, experts, "the experts are asked for in parts");
  }
  {
    ExpertsGraph experts(loaded);
    experts.gate = experts.product("up", experts.x);
    experts.up = experts.product("gate", experts.x);
    experts.build();
    check_fails(host, experts, "a matrix is not that of the workers");
  }
  {
    // Two slots of the same expert.
    ExpertsGraph experts(loaded);
    experts.build();
    experts.result->src[1]->view_offs = 0;
    check_fails(host, experts, "one chosen expert after the other");
  }
  {
    ExpertsGraph experts(loaded);
    experts.build();
    experts.x->type = GGML_TYPE_F16;
    check_fails(host, experts, "other types or shapes");
  }
}

TEST_CASE("somebody else reads what lies between") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  {
    ExpertsGraph experts(loaded);
    experts.build();
    experts.graph.same(GGML_OP_CLAMP, experts.weighted);
    check_fails(host, experts, "is read by others");
  }
  {
    ExpertsGraph experts(loaded);
    experts.build();
    experts.weighted->flags |= GGML_TENSOR_FLAG_OUTPUT;
    check_fails(host, experts, "is read by others");
  }
}

TEST_CASE("scales that the workers do not have") {
  const ExpertsModel held({}), used({.has_scales = true});
  FakeHost host(held);
  CapturedErrors errors;
  CHECK_FALSE(host.is_asked_for(used.tensor("up.scale")));
  const LoadedModel loaded(host, held);
  ExpertsGraph experts(loaded);
  ggml_tensor* scale = experts.graph.leaf("blk.3.ffn_up_exps.scale", {6, 1, 1, 1});
  ggml_tensor* rows = experts.graph.get_rows(
      experts.graph.repeat(experts.graph.reshape(scale, {1, 6, 1, 1}), {1, 6, 3, 1}), experts.ids);
  experts.up = experts.graph.binary(GGML_OP_MUL, experts.product("up", experts.x), rows);
  experts.build();
  check_fails(host, experts, "the experts are asked for in parts");
}

TEST_CASE("an expert that does not exist") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  for (const int32_t id : {-1, 6}) {
    ExpertsGraph experts(loaded);
    experts.build();
    std::memcpy(experts.ids->data, &id, sizeof id);
    check_fails(host, experts, "chose expert " + std::to_string(id) + " of 6");
  }
}

TEST_CASE("a failing worker: the sentence once, then calls work again") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  for (const bool fails_at_submit : {false, true}) {
    host.client().fails_at_submit = fails_at_submit;
    const std::string text = fails_at_submit ? "worker 'b' is gone" : "worker 'a' is gone";
    host.client().fail_with(DFLASH_MOE_WORKER_LOST, text);
    CapturedErrors errors;
    for (int round = 0; round < 3; ++round)
      CHECK(compute(host.backend(), experts.graph.all()) == GGML_STATUS_FAILED);
    CHECK(errors.text() == "dflash-moe: " + text + "\n");
    CHECK(host.client().num_open_calls == 0);
    host.client().fail_with(DFLASH_MOE_OK, "");
    CHECK(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
    experts.check_result();
  }
}

TEST_CASE("after the process began to exit nothing is computed") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  REQUIRE(host.registration().begin());
  host.registration().close_if_idle();
  CHECK_FALSE(host.client().is_closed);  // a thread computes
  host.registration().end();
  CHECK_FALSE(host.registration().begin());
  host.registration().close_if_idle();
  CHECK(host.client().is_closed);
  check_fails(host, experts, "is exiting");
}

}  // namespace
}  // namespace dflash::ggml_plugin
