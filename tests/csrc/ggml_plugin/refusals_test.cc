// What the plug-in does not do with a graph: it fails with a sentence, and never returns wrong
// numbers.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "failed.h"
#include "ggml_plugin/fake_host.h"
#include "ggml_plugin/formula.h"

namespace dflash::ggml_plugin {
namespace {

using compute::Activation;
using compute::GateKind;

TEST_CASE("every number of an activation counts") {
  const ExpertsModel clamped({.gate = GateKind::kClampedSwiglu,
                              .alpha = 1.5f,
                              .up_offset = 1.0f,
                              .gate_max = 7.0f,
                              .up_limit = 7.0f});
  FakeGraph graph;
  ggml_tensor* x = graph.leaf("x", {4, 1, 1, 1});
  const Formula formula = formula_of(*graph.glu(GGML_GLU_OP_SWIGLU_OAI, x, x, 1.5f, 7.0f));
  dflash_moe_layer planned = clamped.facts();
  CHECK(agrees(formula, planned));
  for (float dflash_moe_layer::* number :
       {&dflash_moe_layer::alpha, &dflash_moe_layer::up_offset, &dflash_moe_layer::gate_max,
        &dflash_moe_layer::up_limit}) {
    dflash_moe_layer other = planned;
    other.*number += 0.5f;
    CHECK_FALSE(agrees(formula, other));
  }
  planned.gate = 1;
  CHECK_FALSE(agrees(formula, planned));
  CHECK_FALSE(formula_of(*graph.unary(GGML_UNARY_OP_TANH, x)).is_known);
  CHECK_FALSE(formula_of(*graph.same(GGML_OP_SQR, graph.unary(GGML_UNARY_OP_SILU, x))).is_known);
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
  CHECK(errors.text() == Has{"eval callbacks"});
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
    const ExpertsModel fused({.is_fused = true});
    FakeHost fused_host(fused);
    const LoadedModel fused_loaded(fused_host, fused);
    ExpertsGraph experts(fused_loaded);
    experts.build();
    std::swap(experts.gate->view_offs, experts.up->view_offs);
    check_fails(fused_host, experts, "not the halves of one product");
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

}  // namespace
}  // namespace dflash::ggml_plugin
