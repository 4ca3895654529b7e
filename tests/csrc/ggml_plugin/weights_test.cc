// What becomes of weights: which tensors are taken, which are left to the program while llama.cpp
// can still decide otherwise, and that nothing unverified is computed with.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "failed.h"
#include "ggml_plugin/fake_host.h"

namespace dflash::ggml_plugin {
namespace {

// What was last reported of a tensor.
std::string reason_for(const dflash_moe_client& client, const std::string& name) {
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
    CHECK(reason_for(host.client(), tensor.name) == Has{"no tensor of this name"});
  }
  const FileTensor& up = model.tensor("up.weight");
  CHECK_FALSE(host.is_asked_for(up, GGML_TYPE_I32));
  CHECK(reason_for(host.client(), up.name) == Has{"type"});
  CHECK_FALSE(host.is_asked_for(wider.tensor("up.weight")));
  CHECK(reason_for(host.client(), up.name) == Has{"[48, 16, 6, 1]"});
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
  for (const char* missing :
       {"gate_exps.weight", "down_exps.weight", "up_exps.bias", "down_exps.bias"}) {
    CAPTURE(missing);
    const ExpertsModel model({.has_gate_up_bias = true, .has_down_bias = true});
    dflash_moe_client client;
    client.hold(model);
    std::erase_if(client.tensors, [&](auto& held) { return held.tensor->name.ends_with(missing); });
    Plan plan;
    std::string error;
    REQUIRE(plan.read(&client, &error));
    CHECK_FALSE(plan.layers().front().reason.empty());
  }
}

TEST_CASE("a tensor whose rows lie otherwise is not the planned one") {
  const ExpertsModel model({});
  FakeHost host(model);
  FakeGraph graph;
  const Tensor* planned_up =
      host.registration().plan().find(model.tensor("up.weight").name.c_str());
  REQUIRE(planned_up);
  ggml_tensor* up = graph.leaf(planned_up->name, {24, 16, 6, 1});
  CHECK(difference(*planned_up, *up).empty());
  for (int i = 1; i < 4; ++i) {
    ggml_tensor other = *up;
    other.nb[i] += 4;
    CHECK(difference(*planned_up, other) == Has{"rows lie otherwise"});
  }
  // Rows of twice the bytes, without gaps: another type under the same number.
  for (int i = 1; i < 4; ++i) up->nb[i] *= 2;
  CHECK(difference(*planned_up, *up) == Has{"rows lie otherwise"});
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
  CHECK(reason_for(host.client(), tensor->name) == Has{"no tensor"});
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
    CHECK(reason_for(host.client(), tensor.name) == "taken");
  // Reading gives NaN, with a sentence.
  CapturedErrors errors;
  float value = 1.0f;
  const ggml_tensor* up = loaded.tensor("up.weight");
  loaded.buffer()->iface.get_tensor(loaded.buffer(), up, &value, 0, sizeof value);
  CHECK(value != value);
  CHECK(errors.text() == Has{"ffn_up_exps.weight"});
  CHECK_FALSE(loaded.buffer()->buft->iface.is_host(loaded.buffer()->buft));
}

TEST_CASE("a stub's tensors are verified, and letting their pages go keeps what they say") {
  const ExpertsModel model({});
  FakeHost host(model);
  host.client().is_stub = true;
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  CHECK(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  experts.check_result();  // by the model's own bytes, which were what was written
}

TEST_CASE("a second model with other bytes fails, and the first goes on") {
  const ExpertsModel model({}), other({.seed = 5});
  FakeHost host(model);
  const LoadedModel first(host, model);
  CapturedErrors errors;
  const LoadedModel second(host, model, &other);
  CHECK(reason_for(host.client(), model.tensor("up.weight").name) == "its bytes differ");
  CHECK(errors.text() == Has{"give both the same file"});
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
    CHECK(reason_for(host.client(), down->name) == Has{way < 2 ? "in parts" : "overwrote"});
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

}  // namespace
}  // namespace dflash::ggml_plugin
