// Graphs as ggml describes them, made without ggml: tensors with the shapes, strides, sources and
// parameters that its functions would give them. Intermediate results have no memory, so that a
// backend which touched one would crash.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {

using Extents = std::array<int64_t, 4>;

class FakeGraph {
 public:
  // A tensor that no operation makes; float32 or int32, both of 4 bytes.
  ggml_tensor* leaf(const std::string& name, Extents extents, ggml_type type = GGML_TYPE_F32);
  // Gives a tensor memory, zeroed.
  char* allocate(ggml_tensor* tensor);

  ggml_tensor* mul_mat_id(ggml_tensor* matrices, ggml_tensor* x, ggml_tensor* ids);
  ggml_tensor* mul_mat(ggml_tensor* matrix, ggml_tensor* x);
  ggml_tensor* add_id(ggml_tensor* a, ggml_tensor* bias, ggml_tensor* ids);
  ggml_tensor* binary(ggml_op op, ggml_tensor* a, ggml_tensor* b);
  ggml_tensor* unary(ggml_unary_op op, ggml_tensor* a);
  ggml_tensor* same(ggml_op op, ggml_tensor* a);  // one source, one shape: SQR, CONT, CLAMP
  ggml_tensor* glu(ggml_glu_op op, ggml_tensor* gate, ggml_tensor* up, float alpha = 0.0f,
                   float limit = 0.0f);
  ggml_tensor* repeat(ggml_tensor* a, Extents extents);
  ggml_tensor* get_rows(ggml_tensor* a, ggml_tensor* ids);
  ggml_tensor* reshape(ggml_tensor* a, Extents extents);
  ggml_tensor* view(ggml_tensor* a, Extents extents, size_t nb1, size_t nb2, size_t offset);

  const std::vector<ggml_tensor*>& nodes() const { return nodes_; }
  // A graph of these nodes. Use counts are of the whole graph, as a scheduler's parts have them.
  ggml_cgraph part(std::vector<ggml_tensor*> nodes);
  ggml_cgraph all() { return part(nodes_); }

 private:
  ggml_tensor* make(ggml_type type, Extents extents, ggml_op op,
                    std::initializer_list<ggml_tensor*> sources);
  void count_uses();

  std::deque<ggml_tensor> tensors_;
  std::deque<std::vector<char>> memory_;
  std::vector<ggml_tensor*> nodes_;
  std::deque<std::vector<ggml_tensor*>> parts_;
  std::vector<ggml_tensor*> keys_;
  std::vector<ggml_bitset_t> used_;
  std::vector<int32_t> use_counts_;
};

}  // namespace dflash::ggml_plugin
