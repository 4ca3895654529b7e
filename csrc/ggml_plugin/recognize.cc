// Recognises experts from the back: from the result over the sum, the weighting, down, the
// activation and gate and up to the input, noting each node on the way. Then nothing may be left
// over, and nobody else may read what the workers compute in between.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/recognize.h"

#include <algorithm>

#include "ggml_plugin/formula.h"
#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {
namespace {

bool is_view(const ggml_tensor* node) {
  switch (node->op) {
    case GGML_OP_NONE:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_PERMUTE:
    case GGML_OP_TRANSPOSE: return true;
    default:                return false;
  }
}

bool lies_in_ours(const Scope& scope, const ggml_tensor* tensor) {
  return tensor && tensor->op == GGML_OP_NONE && tensor->buffer &&
         tensor->buffer->buft == scope.weights;
}

const ggml_tensor* root_of(const ggml_tensor* tensor) {
  return tensor->view_src ? tensor->view_src : tensor;
}

bool is_product(const ggml_tensor* node) { return node && node->op == GGML_OP_MUL_MAT_ID; }

// GET_ROWS(REPEAT(RESHAPE(scale))): the scale, or null.
const ggml_tensor* scale_of_repeat(const ggml_tensor* node) {
  if (!node || node->op != GGML_OP_REPEAT || !node->src[0]) return nullptr;
  return root_of(node->src[0]);
}

const ggml_tensor* scale_of_rows(const ggml_tensor* node) {
  return node && node->op == GGML_OP_GET_ROWS ? scale_of_repeat(node->src[0]) : nullptr;
}

// The matrix of the product on which `node` hangs through our scale and bias, or null.
const Tensor* matrix_below(const Scope& scope, const ggml_tensor* node) {
  for (int depth = 0; node && depth < 3; ++depth) {
    if (is_product(node)) return planned(scope, node->src[0]);
    const ggml_tensor* factor = node->op == GGML_OP_MUL      ? scale_of_rows(node->src[1])
                                : node->op == GGML_OP_ADD_ID ? node->src[1]
                                                             : nullptr;
    if (!planned(scope, factor)) return nullptr;
    node = node->src[0];
  }
  return nullptr;
}

bool is_first_matrix(const Tensor* matrix) { return matrix && matrix->part != Part::kDown; }
bool is_down_matrix(const Tensor* matrix) { return matrix && matrix->part == Part::kDown; }

// MUL(experts, weights), where experts hangs on down.
bool is_weighted(const Scope& scope, const ggml_tensor* node) {
  return node && node->op == GGML_OP_MUL && !scale_of_rows(node->src[1]) &&
         is_down_matrix(matrix_below(scope, node->src[0]));
}

bool is_slot(const Scope& scope, const ggml_tensor* node) {
  return node && node->op == GGML_OP_VIEW && is_weighted(scope, node->view_src);
}

bool is_activated(const Scope& scope, const ggml_tensor* node) {
  if (!node || !node->src[0]) return false;
  // The halves of a fused product are views of it.
  const auto is_first = [&](const ggml_tensor* operand) {
    return operand && is_first_matrix(matrix_below(scope, root_of(operand)));
  };
  switch (node->op) {
    case GGML_OP_GLU:   return is_first(node->src[0]) && is_first(node->src[1]);
    case GGML_OP_UNARY: return is_first(node->src[0]);
    case GGML_OP_SQR:   return node->src[0]->op == GGML_OP_UNARY && is_first(node->src[0]->src[0]);
    default:            return false;
  }
}

// What was recognised on the way from the result to the input.
class Walk {
 public:
  Walk(const Scope& scope, ExpertsInGraph* found) : scope_(scope), found_(found) {}

  // Errors: a sentence's end that says what was found and expected; "" where all is as planned.
  std::string from(ggml_tensor* result);
  const std::vector<const ggml_tensor*>& nodes() const { return nodes_; }

 private:
  std::string sum(const ggml_tensor* node);
  std::string slots();
  std::string activated(const ggml_tensor* node);
  // Goes down from `node` to the product with the matrix of `part` and returns its second operand;
  // null with an error.
  const ggml_tensor* product(const ggml_tensor* node, Part part, std::string* error);
  std::string shapes(const ggml_tensor* experts) const;
  void note(const ggml_tensor* node) { nodes_.push_back(node); }

  const Scope& scope_;
  ExpertsInGraph* found_;
  const ggml_tensor* weighted_ = nullptr;
  std::vector<const ggml_tensor*>
      slots_;  // views of weighted_, in the order in which they are added
  std::vector<const ggml_tensor*> nodes_;  // all on the way, views too
};

std::string Walk::sum(const ggml_tensor* node) {
  if (node->op == GGML_OP_CONT) {
    note(node);
    slots_ = {node->src[0]};
  } else {
    for (; node && node->op == GGML_OP_ADD; node = node->src[0]) {
      note(node);
      slots_.push_back(node->src[1]);
    }
    slots_.push_back(node);
    std::reverse(slots_.begin(), slots_.end());
  }
  if (!is_slot(scope_, slots_[0])) return "its result is no sum over the chosen experts";
  weighted_ = slots_[0]->view_src;
  return {};
}

std::string Walk::slots() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    const ggml_tensor* slot = slots_[i];
    if (!slot || slot->op != GGML_OP_VIEW || slot->view_src != weighted_ ||
        slot->view_offs != i * weighted_->nb[1] || slot->nb[1] != weighted_->nb[2] ||
        slot->ne[0] != weighted_->ne[0] || slot->ne[1] != weighted_->ne[2]) {
      return "its sum does not add one chosen expert after the other";
    }
    note(slot);
  }
  found_->top_k = static_cast<uint32_t>(slots_.size());
  return {};
}

const ggml_tensor* Walk::product(const ggml_tensor* node, Part part, std::string* error) {
  const Layer* layer = found_->layer;
  const auto fail = [&](const char* text) {
    *error = text;
    return nullptr;
  };
  const Tensor* bias = layer->tensor(part, Role::kBias);
  if ((node->op == GGML_OP_ADD_ID) != (bias != nullptr))
    return fail("it has biases that the workers lack, or lacks theirs");
  if (bias) {
    if (planned(scope_, node->src[1]) != bias || node->src[2] != found_->ids)
      return fail("a bias is not that of the workers");
    found_->tensors.push_back(node->src[1]);
    note(node);
    node = node->src[0];
  }
  const Tensor* scale = layer->tensor(part, Role::kScale);
  if ((node->op == GGML_OP_MUL) != (scale != nullptr))
    return fail("it has scales that the workers lack, or lacks theirs");
  if (scale) {
    const ggml_tensor* rows = node->src[1];
    const ggml_tensor* factors = scale_of_rows(rows);
    if (!factors || planned(scope_, factors) != scale || rows->src[1] != found_->ids)
      return fail("a scale is not that of the workers");
    found_->tensors.push_back(factors);
    note(node);
    note(rows);
    note(rows->src[0]);
    node = node->src[0];
  }
  if (!is_product(node) || planned(scope_, node->src[0]) != layer->tensor(part, Role::kWeight) ||
      node->src[2] != found_->ids) {
    return fail("a matrix is not that of the workers, or its product is used otherwise");
  }
  found_->tensors.push_back(node->src[0]);
  note(node);
  return node->src[1];
}

std::string Walk::activated(const ggml_tensor* node) {
  const dflash_moe_layer& facts = found_->layer->facts;
  std::string error;
  const Formula formula = formula_of(*node);
  if (!agrees(formula, facts)) return "its activation is not that of the workers";
  note(node);
  if (!formula.is_gated) {
    if (node->op == GGML_OP_SQR) note(node = node->src[0]);
    found_->hidden_states = product(node->src[0], Part::kUp, &error);
    return error;
  }
  const ggml_tensor *gate = node->src[0], *up = node->src[1];
  if (found_->layer->tensor(Part::kGateUp, Role::kWeight)) {
    const ggml_tensor* both = gate->view_src;
    const auto is_half = [&](const ggml_tensor* half, size_t first) {
      return half->op == GGML_OP_VIEW && half->view_src == both &&
             half->view_offs == first * sizeof(float) && half->ne[0] == facts.intermediate_size &&
             half->nb[1] == both->nb[1] && half->nb[2] == both->nb[2];
    };
    if (!both || !is_half(gate, 0) || !is_half(up, facts.intermediate_size))
      return "gate and up are not the halves of one product";
    note(gate);
    note(up);
    found_->hidden_states = product(both, Part::kGateUp, &error);
    return error;
  }
  found_->hidden_states = product(gate, Part::kGate, &error);
  if (!error.empty()) return error;
  if (product(up, Part::kUp, &error) != found_->hidden_states && error.empty())
    error = "gate and up have different inputs";
  return error;
}

// ggml has checked each operation's own shapes; here is what the call needs.
std::string Walk::shapes(const ggml_tensor* experts) const {
  const dflash_moe_layer& facts = found_->layer->facts;
  const ggml_tensor *x = found_->hidden_states, *ids = found_->ids, *weights = found_->weights;
  const int64_t num_tokens = experts->ne[2], num_slots = experts->ne[1];
  const bool has_input = x->type == GGML_TYPE_F32 && x->ne[0] == facts.in_size && x->ne[1] == 1 &&
                         x->ne[2] == num_tokens && x->ne[3] == 1 && x->nb[0] == sizeof(float);
  const bool has_ids = ids->type == GGML_TYPE_I32 && ids->ne[0] == num_slots &&
                       ids->ne[1] == num_tokens && ids->ne[2] == 1 && ids->ne[3] == 1;
  const bool has_weights = weights->type == GGML_TYPE_F32 && weights->ne[0] == 1 &&
                           weights->ne[1] == num_slots && weights->ne[2] == num_tokens &&
                           weights->ne[3] == 1;
  const ggml_tensor* result = found_->result;
  const bool has_result = result->type == GGML_TYPE_F32 && result->ne[0] == facts.out_size &&
                          result->ne[1] == num_tokens && result->ne[2] == 1 && result->ne[3] == 1 &&
                          result->nb[0] == sizeof(float);
  if (!has_input || !has_ids || !has_weights || !has_result || num_tokens > UINT32_MAX ||
      static_cast<int64_t>(found_->top_k) > num_slots) {
    return "its input, ids, weights or result have other types or shapes than the workers take";
  }
  return {};
}

std::string Walk::from(ggml_tensor* result) {
  found_->result = result;
  std::string error = sum(result);
  if (!error.empty()) return error;
  note(weighted_);
  const Tensor* down = matrix_below(scope_, weighted_->src[0]);
  found_->layer = down->layer;
  found_->weights = weighted_->src[1];
  if (error = slots(); !error.empty()) return error;
  const ggml_tensor* product_node = weighted_->src[0];
  while (!is_product(product_node)) product_node = product_node->src[0];
  found_->ids = product_node->src[2];
  const ggml_tensor* h = product(weighted_->src[0], Part::kDown, &error);
  if (!error.empty()) return error;
  if (!is_activated(scope_, h)) return "its activation is not one of those that the workers know";
  if (error = activated(h); !error.empty()) return error;
  found_->num_tokens = static_cast<uint32_t>(product_node->ne[2]);
  return shapes(product_node);
}

// How often the whole graph uses a node; -1 where a graph does not say.
int32_t use_count(const ggml_cgraph& graph, const ggml_tensor* node) {
  const ggml_hash_set& seen = graph.visited_hash_set;
  if (!graph.use_counts || !seen.keys || !seen.used || seen.size == 0) return -1;
  const size_t place = ggml_hash_find(&seen, node);
  if (place == GGML_HASHSET_FULL || !ggml_bitset_get(seen.used, place)) return -1;
  return graph.use_counts[place];
}

// The workers compute none of what lies between input and result, so nobody else may read it.
const ggml_tensor* read_by_others(const ggml_cgraph& graph, const ggml_tensor* result,
                                  const std::vector<const ggml_tensor*>& nodes) {
  for (const ggml_tensor* node : nodes) {
    if (node == result) continue;
    if (node->flags & GGML_TENSOR_FLAG_OUTPUT) return node;
    int32_t uses = 0;
    for (const ggml_tensor* user : nodes)
      for (const ggml_tensor* source : user->src) uses += source == node;
    const int32_t counted = use_count(graph, node);
    if (counted >= 0 && counted != uses) return node;
  }
  return nullptr;
}

// Releases without the flag compute every node.
bool is_computed(const ggml_tensor* node) {
#ifdef DFLASH_GGML_HAS_COMPUTE_FLAG
  if (!(node->flags & GGML_TENSOR_FLAG_COMPUTE)) return false;
#endif
  return !is_view(node);
}

std::string quoted(const ggml_tensor* node) {
  std::string text(1, '\'');
  text.append(name_of(*node)).push_back('\'');
  return text;
}

}  // namespace

const Tensor* planned(const Scope& scope, const ggml_tensor* tensor) {
  return lies_in_ours(scope, tensor) ? scope.plan->find(tensor->name) : nullptr;
}

bool hangs_on_weights(const Scope& scope, const ggml_tensor* node) {
  switch (node->op) {
    // A tensor in our buffers that the plan does not have was forced there, and its loading fails.
    // Before that, llama.cpp's -fit measures a graph with it, and a scheduler stops the program
    // where nobody supports a tensor in the buffer in which it lies.
    case GGML_OP_NONE:       return lies_in_ours(scope, node);
    case GGML_OP_MUL_MAT_ID: return lies_in_ours(scope, node->src[0]);
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:       {
      const ggml_tensor* root = root_of(node);
      return lies_in_ours(scope, root) || matrix_below(scope, root) || is_weighted(scope, root);
    }
    case GGML_OP_REPEAT:   return planned(scope, scale_of_repeat(node)) != nullptr;
    case GGML_OP_GET_ROWS: return planned(scope, scale_of_rows(node)) != nullptr;
    case GGML_OP_ADD_ID:   return matrix_below(scope, node) != nullptr;
    case GGML_OP_MUL:      return matrix_below(scope, node) || is_weighted(scope, node);
    case GGML_OP_GLU:
    case GGML_OP_UNARY:
    case GGML_OP_SQR:      return is_activated(scope, node);
    case GGML_OP_ADD:
      // The ADD of a residual or of shared experts has no slot as its second operand.
      return is_slot(scope, node->src[1]) && node->src[0] &&
             (is_slot(scope, node->src[0]) ||
              (node->src[0]->op == GGML_OP_ADD && is_slot(scope, node->src[0]->src[1])));
    case GGML_OP_CONT: return is_slot(scope, node->src[0]);
    default:           return false;
  }
}

bool next_experts(const Scope& scope, const ggml_cgraph& graph, int* position,
                  ExpertsInGraph* found, std::string* error) {
  *found = {};
  error->clear();
  // The last node of a layer is a sum that the next node does not go on with.
  int last = -1, num_nodes = 0;
  const ggml_tensor* first = nullptr;
  for (int i = *position; i < graph.n_nodes; ++i) {
    ggml_tensor* node = graph.nodes[i];
    if (!is_computed(node)) continue;
    if (last >= 0 && !(node->op == GGML_OP_ADD && node->src[0] == graph.nodes[last])) break;
    if (!first) first = node;
    if (!hangs_on_weights(scope, node)) {
      *error = "node " + quoted(node) +
               " does not belong to the experts of a layer that the workers hold";
      return false;
    }
    ++num_nodes;
    if (node->op == GGML_OP_ADD || node->op == GGML_OP_CONT) last = i;
  }
  if (!first) {
    *position = graph.n_nodes;
    return false;
  }
  if (last < 0) {
    *error = "the experts are asked for in parts, here from node " + quoted(first) +
             " on, as eval callbacks and LoRA adapters for experts do; run this without dflash-moe";
    return false;
  }
  Walk walk(scope, found);
  *error = walk.from(graph.nodes[last]);
  const auto num_found = std::count_if(walk.nodes().begin(), walk.nodes().end(),
                                       [](auto* node) { return is_computed(node); });
  if (error->empty() && num_found != num_nodes) *error = "it does more than the workers' formula";
  if (error->empty()) {
    if (const ggml_tensor* node = read_by_others(graph, found->result, walk.nodes()))
      *error = "node " + quoted(node) + " is read by others, too, and workers return sums only";
  }
  if (!error->empty()) {
    *error = "the experts that end in node " + quoted(graph.nodes[last]) +
             " are none that workers compute: " + *error;
    return false;
  }
  *position = last + 1;
  return true;
}

}  // namespace dflash::ggml_plugin
