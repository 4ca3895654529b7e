// Every form in which llama.cpp builds experts: recognised as a whole, computed with one call,
// equal to a double loop.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>
#include <thread>

#include "ggml_plugin/fake_host.h"

namespace dflash::ggml_plugin {
namespace {

using compute::Activation;
using compute::GateKind;

// Loads a model, builds its graph and has it computed; the result has to be the double loop's.
void check(const ModelOptions& options, const BatchOptions& batch = {}) {
  const ExpertsModel model(options);
  FakeHost host(model);
  for (const FileTensor& tensor : model.tensors()) {
    INFO(tensor.name);
    CHECK(host.is_asked_for(tensor));
  }
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded, batch);
  experts.build();
  // The scheduler asks for each node; what is between the first and the last one has to be ours.
  for (ggml_tensor* node : experts.graph.nodes()) {
    if (node == experts.ids || node == experts.x) continue;
    INFO("node ", node->name, " of operation ", static_cast<int>(node->op));
    CHECK(host.device()->iface.supports_op(host.device(), node));
    CHECK_FALSE(host.weight_device()->iface.supports_op(host.weight_device(), node));
  }
  REQUIRE(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  experts.check_result();
  CHECK(host.client().num_calls == (experts.batch.num_tokens ? 1 : 0));
  CHECK(host.client().num_open_calls == 0);
}

TEST_CASE("gate and up, every gated activation") {
  for (Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                Activation::kRelu, Activation::kQuickGelu}) {
    CAPTURE(static_cast<int>(activation));
    check({.activation = activation});
  }
}

TEST_CASE("limits: swiglu_clamp and the gate of gpt-oss") {
  check({.gate_max = 0.5f, .up_limit = 0.5f});
  check({.gate = GateKind::kClampedSwiglu,
         .alpha = 1.702f,
         .up_offset = 1.0f,
         .gate_max = 0.75f,
         .up_limit = 0.75f,
         .has_gate_up_bias = true,
         .has_down_bias = true});
}

TEST_CASE("no gate: silu, gelu, relu and its square") {
  for (Activation activation :
       {Activation::kSilu, Activation::kGeluTanh, Activation::kRelu, Activation::kReluSquared}) {
    CAPTURE(static_cast<int>(activation));
    check({.activation = activation, .gate = GateKind::kNone});
  }
}

TEST_CASE("gate and up in one matrix, biases, scales, and all together") {
  check({.is_fused = true});
  check({.has_gate_up_bias = true, .has_down_bias = true});
  check({.has_down_bias = true});
  check({.has_scales = true});
  check({.is_fused = true, .has_gate_up_bias = true, .has_down_bias = true, .has_scales = true});
}

TEST_CASE("top-k 1 ends in a CONT, 4 in three ADDs") {
  check({.top_k = 1});
  check({.top_k = 4});
}

TEST_CASE("a warm-up routes to all experts and sums the first") {
  check({.top_k = 2}, {.ids_width = 6});
  check({.top_k = 1, .has_scales = true}, {.ids_width = 6});
}

TEST_CASE("ids lie strided in the sorted experts; one token, none") {
  check({.top_k = 2}, {.ids_stride = 6});
  check({.top_k = 3}, {.num_tokens = 1, .ids_stride = 6});
  check({}, {.num_tokens = 0});
}

TEST_CASE("the plan's top-k is not the graph's: the ADDs count") {
  const ExpertsModel held({.top_k = 4}), used({.top_k = 3});
  FakeHost host(held);
  const LoadedModel loaded(host, used);
  ExpertsGraph experts(loaded);
  experts.build();
  REQUIRE(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  CHECK(host.client().last_top_k == 3);
  experts.check_result();
}

TEST_CASE("shared experts and the residual beside stay with the program") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  FakeGraph& graph = experts.graph;
  ggml_tensor* shared_weight = graph.leaf("blk.3.ffn_up_shexp.weight", {24, 20, 1, 1});
  ggml_tensor* shared = graph.mul_mat(shared_weight, experts.x);
  ggml_tensor* sum = graph.binary(GGML_OP_ADD, experts.result, shared);
  ggml_tensor* residual = graph.binary(GGML_OP_ADD, sum, experts.result);
  ggml_tensor* scaled = graph.binary(GGML_OP_MUL, residual, experts.weights);
  for (ggml_tensor* node : {shared, sum, residual, scaled})
    CHECK_FALSE(host.device()->iface.supports_op(host.device(), node));
  REQUIRE(compute(host.backend(), graph.part(nodes_for(host.device(), graph))) ==
          GGML_STATUS_SUCCESS);
  experts.check_result();
}

TEST_CASE("two layers in one part of a graph are two calls") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded), second(loaded, {.seed = 31});
  experts.build();
  second.build();
  std::vector<ggml_tensor*> nodes = experts.graph.nodes();
  nodes.insert(nodes.end(), second.graph.nodes().begin(), second.graph.nodes().end());
  REQUIRE(compute(host.backend(), experts.graph.part(nodes)) == GGML_STATUS_SUCCESS);
  experts.check_result();
  second.check_result();
  CHECK(host.client().num_calls == 2);
}

TEST_CASE("nodes that are not to be computed are passed over") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  for (ggml_tensor* node : experts.graph.nodes()) node->flags &= ~GGML_TENSOR_FLAG_COMPUTE;
  REQUIRE(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  CHECK(host.client().num_calls == 0);
}

TEST_CASE("a result in the memory of its own input is computed aside") {
  const ExpertsModel model({});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded, {.num_tokens = 9});
  experts.build();
  CHECK(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  CHECK(host.client().last_output == experts.result->data);  // straight into the graph's memory
  ExpertsGraph aliased(loaded, {.num_tokens = 9});
  aliased.build();
  // ggml-alloc may put it anywhere in memory that it believes free; here behind the first row.
  aliased.result->data = static_cast<char*>(aliased.x->data) + 24 * sizeof(float);
  CHECK(compute(host.backend(), aliased.graph.all()) == GGML_STATUS_SUCCESS);
  CHECK(host.client().last_output != aliased.result->data);
  aliased.check_result();
  ExpertsGraph over_weights(loaded, {.num_tokens = 9});
  over_weights.build();
  over_weights.weights->data = over_weights.result->data;
  std::memcpy(over_weights.weights->data, over_weights.weight_values.data(),
              over_weights.weight_values.size() * sizeof(float));
  CHECK(compute(host.backend(), over_weights.graph.all()) == GGML_STATUS_SUCCESS);
  over_weights.check_result();
}

TEST_CASE("a result with padded rows") {
  const ExpertsModel model({.top_k = 1});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  ExpertsGraph experts(loaded);
  experts.build();
  experts.result->nb[1] += 12;
  const char* data = experts.graph.allocate(experts.result);
  REQUIRE(compute(host.backend(), experts.graph.all()) == GGML_STATUS_SUCCESS);
  const auto expected =
      model.expected(experts.x_values, experts.id_values, experts.weight_values, 1, 1);
  for (size_t i = 0; i < expected.size(); ++i) {
    float value;
    std::memcpy(&value, data + i / 20 * experts.result->nb[1] + i % 20 * sizeof(float),
                sizeof value);
    REQUIRE(std::abs(value - expected[i]) < 1e-4f);
  }
}

TEST_CASE("several contexts compute at once") {
  const ExpertsModel model({.has_gate_up_bias = true, .has_down_bias = true});
  FakeHost host(model);
  const LoadedModel loaded(host, model);
  constexpr unsigned kNumThreads = 4, kNumRounds = 20;
  std::vector<ggml_backend_t> backends;
  for (unsigned i = 0; i < kNumThreads; ++i) backends.push_back(host.backend());
  std::vector<std::vector<std::unique_ptr<ExpertsGraph>>> graphs(kNumThreads);
  std::vector<std::thread> threads;
  std::atomic<int> num_failed = 0;
  for (unsigned i = 0; i < kNumThreads; ++i) {
    threads.emplace_back([&, i] {
      for (unsigned round = 0; round < kNumRounds; ++round) {
        graphs[i].push_back(std::make_unique<ExpertsGraph>(
            loaded, BatchOptions{.num_tokens = 1 + (round + i) % 5, .seed = 10 * i + round}));
        graphs[i].back()->build();
        if (compute(backends[i], graphs[i].back()->graph.all()) != GGML_STATUS_SUCCESS)
          ++num_failed;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_failed == 0);
  for (const auto& of_thread : graphs)
    for (const auto& experts : of_thread) experts->check_result();
}

}  // namespace
}  // namespace dflash::ggml_plugin
