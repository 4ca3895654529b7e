// What the workers hold, as the client library tells it: layers, and the tensors of the GGUF file
// that the program need not load, with their place in the formula of an expert.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

#include "c_interface/dflash_moe.h"

struct ggml_tensor;

namespace dflash::ggml_plugin {

// Which matrix of an expert a tensor belongs to; kGateUp holds both in one, gate first.
enum class Part : uint8_t { kGate, kUp, kGateUp, kDown };
inline constexpr size_t kNumParts = 4;
// A matrix per expert, a vector per expert that is added, or one factor per expert.
enum class Role : uint8_t { kWeight, kBias, kScale };
inline constexpr size_t kNumRoles = 3;

struct Layer;

struct Tensor {
  std::string name;  // blk.N.ffn_PART_exps.ROLE
  Part part;
  Role role;
  uint32_t position;  // among all tensors of the plan
  uint32_t type;      // the number of enum ggml_type, which is GGUF's
  int64_t extents[4];
  uint64_t num_bytes;
  const Layer* layer;
};

struct Layer {
  dflash_moe_layer facts;
  const Tensor* tensors[kNumParts][kNumRoles] = {};  // null where the layer has none
  std::string reason;  // why the program has to keep this layer; "" where the workers stand in
  const Tensor* tensor(Part part, Role role) const {
    return tensors[static_cast<size_t>(part)][static_cast<size_t>(role)];
  }
};

// Immutable once read, so that any thread may look things up.
class Plan {
 public:
  // Asks `client`, whose texts it refers to. Returns false with `error` where the library does not
  // answer. Tensors that are none of an expert's are left out, so that they are refused by name.
  bool read(dflash_moe_client* client, std::string* error);

  dflash_moe_client* client() const { return client_; }
  const std::deque<Layer>& layers() const { return layers_; }
  uint32_t num_tensors() const { return static_cast<uint32_t>(tensors_.size()); }
  // The tensor of that name, or null. `name` may lack its end within GGML_MAX_NAME bytes.
  const Tensor* find(const char* name) const;

 private:
  void check_layers();

  dflash_moe_client* client_ = nullptr;
  std::deque<Layer> layers_;    // a deque, so that pointers into it stay valid
  std::deque<Tensor> tensors_;  // ditto
  std::unordered_map<std::string_view, const Tensor*> by_name_;
};

// Why `tensor` of a graph or of a model that is being loaded is not `planned`: type, shape or
// strides; "" where it is. The strides have to be those of a contiguous tensor.
std::string difference(const Tensor& planned, const ggml_tensor& tensor);

// The name of a tensor, which need not be terminated where memory is not what it seems.
std::string_view name_of(const ggml_tensor& tensor);

}  // namespace dflash::ggml_plugin
