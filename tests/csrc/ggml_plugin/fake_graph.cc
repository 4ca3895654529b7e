// Shapes and strides of ggml's operations.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/fake_graph.h"

#include <atomic>

namespace dflash::ggml_plugin {
namespace {

constexpr size_t kElementBytes = 4;

void set_extents(ggml_tensor* tensor, Extents extents) {
  size_t stride = kElementBytes;
  for (size_t i = 0; i < 4; ++i) {
    tensor->ne[i] = extents[i];
    tensor->nb[i] = stride;
    stride *= static_cast<size_t>(extents[i]);
  }
}

Extents extents_of(const ggml_tensor* tensor) {
  return {tensor->ne[0], tensor->ne[1], tensor->ne[2], tensor->ne[3]};
}

}  // namespace

ggml_tensor* FakeGraph::make(ggml_type type, Extents extents, ggml_op op,
                             std::initializer_list<ggml_tensor*> sources) {
  ggml_tensor* tensor = &tensors_.emplace_back();
  tensor->type = type;
  tensor->op = op;
  set_extents(tensor, extents);
  size_t i = 0;
  for (ggml_tensor* source : sources) tensor->src[i++] = source;
  if (op != GGML_OP_NONE) {
    // Unique in the process, because a sentence that names a node is said once.
    static std::atomic<int> num_made = 0;
    const std::string name = "node_" + std::to_string(num_made++);
    std::strncpy(tensor->name, name.c_str(), sizeof tensor->name - 1);
    tensor->flags |= GGML_TENSOR_FLAG_COMPUTE;
    nodes_.push_back(tensor);
  }
  return tensor;
}

ggml_tensor* FakeGraph::leaf(const std::string& name, Extents extents, ggml_type type) {
  ggml_tensor* tensor = make(type, extents, GGML_OP_NONE, {});
  std::strncpy(tensor->name, name.c_str(), sizeof tensor->name - 1);
  return tensor;
}

char* FakeGraph::allocate(ggml_tensor* tensor) {
  size_t bytes = kElementBytes;
  for (int i = 0; i < 4; ++i) bytes += static_cast<size_t>(tensor->ne[i] - 1) * tensor->nb[i];
  memory_.emplace_back(bytes);
  tensor->data = memory_.back().data();
  return memory_.back().data();
}

ggml_tensor* FakeGraph::mul_mat_id(ggml_tensor* matrices, ggml_tensor* x, ggml_tensor* ids) {
  return make(GGML_TYPE_F32, {matrices->ne[1], ids->ne[0], x->ne[2], 1}, GGML_OP_MUL_MAT_ID,
              {matrices, x, ids});
}

ggml_tensor* FakeGraph::mul_mat(ggml_tensor* matrix, ggml_tensor* x) {
  return make(GGML_TYPE_F32, {matrix->ne[1], x->ne[1], x->ne[2], x->ne[3]}, GGML_OP_MUL_MAT,
              {matrix, x});
}

ggml_tensor* FakeGraph::add_id(ggml_tensor* a, ggml_tensor* bias, ggml_tensor* ids) {
  return make(GGML_TYPE_F32, extents_of(a), GGML_OP_ADD_ID, {a, bias, ids});
}

ggml_tensor* FakeGraph::binary(ggml_op op, ggml_tensor* a, ggml_tensor* b) {
  return make(GGML_TYPE_F32, extents_of(a), op, {a, b});
}

ggml_tensor* FakeGraph::unary(ggml_unary_op op, ggml_tensor* a) {
  ggml_tensor* node = make(GGML_TYPE_F32, extents_of(a), GGML_OP_UNARY, {a});
  node->op_params[0] = op;
  return node;
}

ggml_tensor* FakeGraph::same(ggml_op op, ggml_tensor* a) {
  return make(GGML_TYPE_F32, extents_of(a), op, {a});
}

ggml_tensor* FakeGraph::glu(ggml_glu_op op, ggml_tensor* gate, ggml_tensor* up, float alpha,
                            float limit) {
  ggml_tensor* node = make(GGML_TYPE_F32, extents_of(gate), GGML_OP_GLU, {gate, up});
  node->op_params[0] = op;
  std::memcpy(&node->op_params[2], &alpha, sizeof alpha);
  std::memcpy(&node->op_params[3], &limit, sizeof limit);
  return node;
}

ggml_tensor* FakeGraph::repeat(ggml_tensor* a, Extents extents) {
  return make(GGML_TYPE_F32, extents, GGML_OP_REPEAT, {a});
}

ggml_tensor* FakeGraph::get_rows(ggml_tensor* a, ggml_tensor* ids) {
  return make(GGML_TYPE_F32, {a->ne[0], ids->ne[0], ids->ne[1], ids->ne[2]}, GGML_OP_GET_ROWS,
              {a, ids});
}

ggml_tensor* FakeGraph::reshape(ggml_tensor* a, Extents extents) {
  ggml_tensor* node = make(a->type, extents, GGML_OP_RESHAPE, {a});
  node->view_src = a->view_src ? a->view_src : a;
  node->data = a->data;
  return node;
}

ggml_tensor* FakeGraph::view(ggml_tensor* a, Extents extents, size_t nb1, size_t nb2,
                             size_t offset) {
  ggml_tensor* node = make(a->type, extents, GGML_OP_VIEW, {a});
  node->nb[1] = nb1;
  node->nb[2] = nb2;
  node->nb[3] = nb2 * static_cast<size_t>(extents[2]);
  node->view_src = a->view_src ? a->view_src : a;
  node->view_offs = offset + (a->view_src ? a->view_offs : 0);
  if (a->data) node->data = static_cast<char*>(a->data) + offset;
  return node;
}

void FakeGraph::count_uses() {
  keys_.assign(8 * tensors_.size() + 64, nullptr);
  used_.assign(keys_.size() / 32 + 1, 0);
  use_counts_.assign(keys_.size(), 0);
  ggml_hash_set set = {};
  set.size = keys_.size();
  set.used = used_.data();
  set.keys = keys_.data();
  // ggml's own insertion would call ggml where the set is full.
  for (ggml_tensor& tensor : tensors_) {
    const size_t place = ggml_hash_find(&set, &tensor);
    ggml_bitset_set(set.used, place);
    keys_[place] = &tensor;
  }
  for (const ggml_tensor* node : nodes_)
    for (ggml_tensor* source : node->src)
      if (source) ++use_counts_[ggml_hash_find(&set, source)];
}

ggml_cgraph FakeGraph::part(std::vector<ggml_tensor*> nodes) {
  count_uses();
  parts_.push_back(std::move(nodes));
  ggml_cgraph graph = {};
  graph.n_nodes = static_cast<int>(parts_.back().size());
  graph.nodes = parts_.back().data();
  graph.use_counts = use_counts_.data();
  graph.visited_hash_set = {keys_.size(), used_.data(), keys_.data()};
  return graph;
}

}  // namespace dflash::ggml_plugin
