// Plays llama.cpp: loader, graph builder and scheduler.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/fake_host.h"

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "compute/experts/ffn_spec.h"
#include "failed.h"

namespace dflash::ggml_plugin {
namespace {

Extents four(const std::vector<int64_t>& extents) {
  Extents all = {1, 1, 1, 1};
  std::copy(extents.begin(), extents.end(), all.begin());
  return all;
}

ggml_glu_op glu_of(const ModelOptions& options) {
  using compute::Activation;
  if (options.gate == compute::GateKind::kClampedSwiglu) return GGML_GLU_OP_SWIGLU_OAI;
  if (!std::isinf(options.gate_max)) return GGML_GLU_OP_SWIGLU_CLAMP;
  switch (options.activation) {
    case Activation::kGeluTanh:  return GGML_GLU_OP_GEGLU;
    case Activation::kGelu:      return GGML_GLU_OP_GEGLU_ERF;
    case Activation::kQuickGelu: return GGML_GLU_OP_GEGLU_QUICK;
    case Activation::kRelu:      return GGML_GLU_OP_REGLU;
    default:                     return GGML_GLU_OP_SWIGLU;
  }
}

ggml_unary_op unary_of(compute::Activation activation) {
  using compute::Activation;
  switch (activation) {
    case Activation::kGeluTanh:    return GGML_UNARY_OP_GELU;
    case Activation::kRelu:
    case Activation::kReluSquared: return GGML_UNARY_OP_RELU;
    default:                       return GGML_UNARY_OP_SILU;
  }
}

}  // namespace

FakeHost::FakeHost(const ExpertsModel& held) {
  client_.hold(held);
  Plan plan;
  std::string error;
  REQUIRE(plan.read(&client_, &error));
  registration_ = std::make_unique<Registration>(std::move(plan));
}

FakeHost::~FakeHost() {
  for (ggml_backend_t backend : backends_) backend->iface.free(backend);
}

ggml_backend_dev_t FakeHost::device(size_t index) {
  ggml_backend_reg_t reg = registration_->reg();
  return reg->iface.get_device(reg, index);
}

bool FakeHost::is_asked_for(const FileTensor& tensor, ggml_type type) {
  FakeGraph question;
  ggml_backend_buffer empty = {};
  empty.buft = weight_device()->iface.get_buffer_type(weight_device());
  ggml_tensor* weight = question.leaf(tensor.name, four(tensor.extents), type);
  weight->buffer = &empty;
  ggml_tensor* ids = question.leaf("", {2, 512, 1, 1}, GGML_TYPE_I32);
  const bool is_bias = tensor.name.ends_with(".bias");
  ggml_tensor* operand = question.leaf("", {weight->ne[0], 2, 512, 1});
  ggml_tensor* op =
      is_bias ? question.add_id(operand, weight, ids) : question.mul_mat_id(weight, operand, ids);
  return weight_device()->iface.supports_op(weight_device(), op);
}

ggml_backend_t FakeHost::backend() {
  backends_.push_back(device()->iface.init_backend(device(), nullptr));
  REQUIRE(backends_.back());
  return backends_.back();
}

LoadedModel::LoadedModel(FakeHost& host, const ExpertsModel& model, const ExpertsModel* written)
    : model_(model) {
  ggml_backend_buffer_type_t type =
      host.weight_device()->iface.get_buffer_type(host.weight_device());
  size_t bytes = 0;
  for (const FileTensor& tensor : model.tensors()) bytes += tensor.values.size() * sizeof(float);
  buffer_ = type->iface.alloc_buffer(type, bytes);
  REQUIRE(buffer_);
  buffer_->usage = GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
  char* next = static_cast<char*>(buffer_->iface.get_base(buffer_));
  for (size_t i = 0; i < model.tensors().size(); ++i) {
    const FileTensor& file = model.tensors()[i];
    ggml_tensor* tensor = tensors_.leaf(file.name, four(file.extents));
    tensor->buffer = buffer_;
    tensor->data = next;
    next += file.values.size() * sizeof(float);
    REQUIRE(buffer_->iface.init_tensor(buffer_, tensor) == GGML_STATUS_SUCCESS);
    const auto& values = written ? written->tensors()[i].values : file.values;
    buffer_->iface.set_tensor(buffer_, tensor, values.data(), 0, values.size() * sizeof(float));
    by_name_[file.name] = tensor;
  }
}

LoadedModel::~LoadedModel() {
  buffer_->iface.free_buffer(buffer_);
  delete buffer_;
}

ggml_tensor* LoadedModel::tensor(const std::string& part_and_role) const {
  return by_name_.at(model_.name(part_and_role));
}

ExpertsGraph::ExpertsGraph(const LoadedModel& model, const BatchOptions& options)
    : loaded(model), batch(options) {
  const ModelOptions& o = loaded.model().options();
  if (batch.ids_width == 0) batch.ids_width = o.top_k;
  if (batch.ids_stride == 0) batch.ids_stride = batch.ids_width;
  const uint32_t num_tokens = batch.num_tokens, width = batch.ids_width;
  x_values = random_values(size_t{num_tokens} * o.in_size, batch.seed);
  weight_values = random_values(size_t{num_tokens} * width, batch.seed + 1);
  std::mt19937 engine(batch.seed + 2);
  std::vector<int32_t> order(o.num_experts);
  for (uint32_t i = 0; i < o.num_experts; ++i) order[i] = static_cast<int32_t>(i);
  for (uint32_t token = 0; token < num_tokens; ++token) {
    std::shuffle(order.begin(), order.end(), engine);
    id_values.insert(id_values.end(), order.begin(), order.begin() + width);
  }
  ggml_tensor* input = graph.leaf("ffn_norm", {o.in_size, num_tokens, 1, 1});
  std::copy(x_values.begin(), x_values.end(), reinterpret_cast<float*>(graph.allocate(input)));
  ggml_tensor* sorted = graph.leaf("sorted", {batch.ids_stride, num_tokens, 1, 1}, GGML_TYPE_I32);
  char* to = graph.allocate(sorted);
  for (uint32_t token = 0; token < num_tokens; ++token)
    std::memcpy(to + token * sorted->nb[1], &id_values[token * width], width * sizeof(int32_t));
  weights = graph.leaf("ffn_moe_weights", {1, width, num_tokens, 1});
  std::copy(weight_values.begin(), weight_values.end(),
            reinterpret_cast<float*>(graph.allocate(weights)));
  ids = graph.view(sorted, {width, num_tokens, 1, 1}, sorted->nb[1], sorted->nb[2], 0);
  x = graph.reshape(input, {o.in_size, 1, num_tokens, 1});
}

ggml_tensor* ExpertsGraph::product(const std::string& part, ggml_tensor* operand) {
  const ModelOptions& o = loaded.model().options();
  ggml_tensor* node = graph.mul_mat_id(loaded.tensor(part + ".weight"), operand, ids);
  if (o.has_scales) {
    const Extents rows = {1, o.num_experts, 1, 1};
    ggml_tensor* scale = graph.reshape(loaded.tensor(part + ".scale"), rows);
    scale = graph.repeat(scale, {1, o.num_experts, batch.num_tokens, 1});
    node = graph.binary(GGML_OP_MUL, node, graph.get_rows(scale, ids));
  }
  if (part == "down" ? o.has_down_bias : o.has_gate_up_bias)
    node = graph.add_id(node, loaded.tensor(part + ".bias"), ids);
  return node;
}

void ExpertsGraph::build() {
  const ModelOptions& o = loaded.model().options();
  ggml_tensor* h;
  if (o.is_fused && !up) {
    ggml_tensor* both = product("gate_up", x);
    const Extents half = {both->ne[0] / 2, both->ne[1], both->ne[2], 1};
    gate = graph.view(both, half, both->nb[1], both->nb[2], 0);
    up = graph.view(both, half, both->nb[1], both->nb[2], half[0] * sizeof(float));
  }
  if (!up) up = product("up", x);
  if (o.gate == compute::GateKind::kNone) {
    h = graph.unary(unary_of(o.activation), up);
    if (o.activation == compute::Activation::kReluSquared) h = graph.same(GGML_OP_SQR, h);
  } else {
    if (!gate) gate = product("gate", x);
    h = graph.glu(glu_of(o), gate, up, o.alpha, o.gate_max);
  }
  weighted = graph.binary(GGML_OP_MUL, product("down", h), weights);
  std::vector<ggml_tensor*> slots;
  for (size_t i = 0; i < o.top_k; ++i)
    slots.push_back(graph.view(weighted, {o.out_size, batch.num_tokens, 1, 1}, weighted->nb[2],
                               weighted->nb[3], i * weighted->nb[1]));
  result = slots[0];
  for (size_t i = 1; i < slots.size(); ++i) result = graph.binary(GGML_OP_ADD, result, slots[i]);
  if (slots.size() == 1) {
    result = graph.same(GGML_OP_CONT, result);
  }
  graph.allocate(result);
}

void ExpertsGraph::check_result() const {
  const ModelOptions& o = loaded.model().options();
  const std::vector<float> expected =
      loaded.model().expected(x_values, id_values, weight_values, batch.ids_width, o.top_k);
  const float* values = static_cast<const float*>(result->data);
  for (size_t i = 0; i < expected.size(); ++i) {
    INFO("element ", i);
    // Sums of at most 24 products of values below 1, twice, in float32.
    REQUIRE(std::abs(values[i] - expected[i]) < 1e-4f);
  }
}

std::vector<ggml_tensor*> nodes_for(ggml_backend_dev_t device, const FakeGraph& graph) {
  std::vector<ggml_tensor*> nodes;
  bool has_begun = false;
  for (ggml_tensor* node : graph.nodes()) {
    const bool is_view = node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE;
    const bool is_ours = is_view || device->iface.supports_op(device, node);
    if (is_ours) nodes.push_back(node);
    if (!is_ours && has_begun) break;
    has_begun = has_begun || (is_ours && !is_view);
  }
  return nodes;
}

ggml_status compute(ggml_backend_t backend, ggml_cgraph graph) {
  return backend->iface.graph_compute(backend, &graph);
}

CapturedErrors::CapturedErrors()
    : saved_(::dup(STDERR_FILENO)), file_(::memfd_create("stderr", MFD_CLOEXEC)) {
  REQUIRE(file_ >= 0);
  ::dup2(file_, STDERR_FILENO);
}

CapturedErrors::~CapturedErrors() {
  ::dup2(saved_, STDERR_FILENO);
  ::close(saved_);
  ::close(file_);
}

std::string CapturedErrors::text() {
  std::string text(static_cast<size_t>(::lseek(file_, 0, SEEK_END)), '\0');
  REQUIRE(::pread(file_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()));
  return text;
}

void check_fails(FakeHost& host, FakeGraph& graph, std::vector<ggml_tensor*> nodes,
                 const std::string& text) {
  CapturedErrors errors;
  const int num_calls = host.client().num_calls;
  CHECK(compute(host.backend(), graph.part(std::move(nodes))) == GGML_STATUS_FAILED);
  CHECK(host.client().num_calls == num_calls);
  const std::string said = errors.text();
  INFO("said: ", said);
  CHECK(said == Has{text});
}

void check_fails(FakeHost& host, ExpertsGraph& experts, const std::string& text) {
  check_fails(host, experts.graph, nodes_for(host.device(), experts.graph), text);
}

}  // namespace dflash::ggml_plugin
