// Reads the plan from the client library and sorts its tensors by their names.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/plan.h"

#include <cstring>
#include <optional>

#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {
namespace {

struct Place {
  uint32_t layer;
  Part part;
  Role role;
};

// Takes `text` off the front of `rest`.
bool skip(std::string_view& rest, std::string_view text) {
  if (!rest.starts_with(text)) return false;
  rest.remove_prefix(text.size());
  return true;
}

// Splits blk.N.ffn_PART_exps.ROLE; empty for any other name.
std::optional<Place> place_of(std::string_view name) {
  Place place = {};
  if (!skip(name, "blk.")) return std::nullopt;
  size_t digits = 0;
  for (; digits < name.size() && digits < 6 && name[digits] >= '0' && name[digits] <= '9'; ++digits)
    place.layer = place.layer * 10 + static_cast<uint32_t>(name[digits] - '0');
  if (digits == 0) return std::nullopt;
  name.remove_prefix(digits);
  if (skip(name, ".ffn_gate_up_exps."))
    place.part = Part::kGateUp;
  else if (skip(name, ".ffn_gate_exps."))
    place.part = Part::kGate;
  else if (skip(name, ".ffn_up_exps."))
    place.part = Part::kUp;
  else if (skip(name, ".ffn_down_exps."))
    place.part = Part::kDown;
  else
    return std::nullopt;
  if (name == "weight")
    place.role = Role::kWeight;
  else if (name == "bias")
    place.role = Role::kBias;
  else if (name == "scale")
    place.role = Role::kScale;
  else
    return std::nullopt;
  return place;
}

std::string shape_text(const int64_t (&extents)[4]) {
  std::string text = "[";
  for (int i = 0; i < 4; ++i) text += (i ? ", " : "") + std::to_string(extents[i]);
  return text + "]";
}

// Bytes beyond this would overflow the arithmetic below; no file is as large.
constexpr uint64_t kMostBytes = uint64_t{1} << 56;

}  // namespace

std::string_view name_of(const ggml_tensor& tensor) {
  return {tensor.name, strnlen(tensor.name, sizeof tensor.name)};
}

bool Plan::read(dflash_moe_client* client, std::string* error) {
  client_ = client;
  std::unordered_map<uint32_t, Layer*> by_number;
  for (uint32_t i = 0; i < dflash_moe_num_layers(client); ++i) {
    Layer layer;
    layer.facts.struct_bytes = sizeof layer.facts;
    if (dflash_moe_layer_at(client, i, &layer.facts) != DFLASH_MOE_OK) {
      *error = dflash_moe_error();
      return false;
    }
    layers_.push_back(std::move(layer));
    by_number.emplace(layers_.back().facts.layer, &layers_.back());
  }
  for (uint32_t i = 0; i < dflash_moe_num_tensors(client); ++i) {
    dflash_moe_tensor fact = {};
    fact.struct_bytes = sizeof fact;
    if (dflash_moe_tensor_at(client, i, &fact) != DFLASH_MOE_OK) {
      *error = dflash_moe_error();
      return false;
    }
    const std::optional<Place> place = place_of(fact.name);
    if (!place || place->layer != fact.layer || fact.num_bytes > kMostBytes) continue;
    const auto owner = by_number.find(fact.layer);
    if (owner == by_number.end() || by_name_.contains(fact.name)) continue;
    Layer& layer = *owner->second;
    Tensor tensor = {.name = fact.name,
                     .part = place->part,
                     .role = place->role,
                     .position = num_tensors(),
                     .type = fact.ggml_type,
                     .extents = {},
                     .num_bytes = fact.num_bytes,
                     .layer = &layer};
    for (int k = 0; k < 4; ++k) tensor.extents[k] = static_cast<int64_t>(fact.extents[k]);
    tensors_.push_back(std::move(tensor));
    by_name_.emplace(tensors_.back().name, &tensors_.back());
    layer.tensors[static_cast<size_t>(place->part)][static_cast<size_t>(place->role)] =
        &tensors_.back();
  }
  check_layers();
  return true;
}

// A layer is taken whole or not at all: what the program keeps of a layer could not reach workers.
void Plan::check_layers() {
  for (Layer& layer : layers_) {
    const auto has = [&](Part part, Role role) { return layer.tensor(part, role) != nullptr; };
    const bool is_fused = has(Part::kGateUp, Role::kWeight);
    const bool is_gated = is_fused || has(Part::kGate, Role::kWeight);
    const bool has_up = is_fused != has(Part::kUp, Role::kWeight);
    if (!has_up || !has(Part::kDown, Role::kWeight) || is_gated != (layer.facts.gate != 0))
      layer.reason = "the plan does not name all matrices of its experts";
    const bool has_first_bias = has(is_fused ? Part::kGateUp : Part::kUp, Role::kBias) &&
                                (is_fused || !is_gated || has(Part::kGate, Role::kBias));
    const bool has_any_bias = has(Part::kGateUp, Role::kBias) || has(Part::kGate, Role::kBias) ||
                              has(Part::kUp, Role::kBias);
    if (has_first_bias != (layer.facts.has_gate_up_bias != 0) || has_any_bias != has_first_bias ||
        has(Part::kDown, Role::kBias) != (layer.facts.has_down_bias != 0))
      layer.reason = "the plan's biases are not those that it names as tensors";
  }
}

const Tensor* Plan::find(const char* name) const {
  const auto found = by_name_.find(std::string_view(name, strnlen(name, GGML_MAX_NAME)));
  return found == by_name_.end() ? nullptr : found->second;
}

std::string difference(const Tensor& planned, const ggml_tensor& tensor) {
  if (static_cast<uint32_t>(tensor.type) != planned.type) {
    return "its type has the number " + std::to_string(static_cast<int>(tensor.type)) +
           " in GGUF, that of the workers " + std::to_string(planned.type);
  }
  for (int i = 0; i < 4; ++i) {
    if (tensor.ne[i] != planned.extents[i])
      return "its shape is " + shape_text(tensor.ne) + ", that of the workers " +
             shape_text(planned.extents);
  }
  // nb[0] is the size of a block and nb[1] that of a row, which ggml knows per type; the size of
  // the whole tells whether they are right.
  uint64_t bytes = tensor.nb[1];
  bool is_contiguous = bytes <= kMostBytes;
  for (int i = 1; i < 4 && is_contiguous; ++i) {
    is_contiguous = tensor.nb[i] == bytes && bytes <= kMostBytes;
    bytes *= static_cast<uint64_t>(tensor.ne[i]);
  }
  if (!is_contiguous || bytes != planned.num_bytes)
    return "its rows lie otherwise in memory than those of the workers";
  return {};
}

}  // namespace dflash::ggml_plugin
