// A layer of experts with random weights: as tensors of a GGUF file, as what workers hold, and as a
// double loop that says what comes out.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "c_interface/dflash_moe.h"
#include "compute/experts/expert_layer.h"
#include "compute/experts/ffn_spec.h"

namespace dflash::ggml_plugin {

struct ModelOptions {
  uint32_t layer = 3;
  uint32_t in_size = 24, intermediate_size = 16, out_size = 20;
  uint32_t num_experts = 6, top_k = 2;
  compute::Activation activation = compute::Activation::kSilu;
  compute::GateKind gate = compute::GateKind::kGated;
  float alpha = 1.0f, up_offset = 0.0f;
  float gate_max = __builtin_inff(), up_limit = __builtin_inff();
  bool is_fused = false, has_gate_up_bias = false, has_down_bias = false, has_scales = false;
  unsigned seed = 1;
};

// A tensor of the file, all of it float32.
struct FileTensor {
  std::string name;
  std::vector<int64_t> extents;  // GGUF's order
  std::vector<float> values;
};

class ExpertsModel {
 public:
  explicit ExpertsModel(const ModelOptions& options);

  const ModelOptions& options() const { return options_; }
  const std::vector<FileTensor>& tensors() const { return tensors_; }
  const FileTensor& tensor(const std::string& part_and_role) const;
  std::string name(const std::string& part_and_role) const;
  compute::FfnSpec spec() const;
  dflash_moe_layer facts() const;
  // What a worker holds: scales are multiplied in.
  std::vector<float> held(const std::string& part) const;
  // sum over slots of weights[t][s] * expert ids[t][s] (x[t]), in float64; the slots of a token lie
  // `width` apart and the first `top_k` count.
  std::vector<float> expected(const std::vector<float>& x, const std::vector<int32_t>& ids,
                              const std::vector<float>& weights, size_t width, size_t top_k) const;

 private:
  bool is_gated() const { return options_.gate != compute::GateKind::kNone; }
  void add(const std::string& part, uint32_t inputs, uint32_t outputs, bool has_bias);

  ModelOptions options_;
  std::vector<FileTensor> tensors_;
};

std::vector<float> random_values(size_t count, unsigned seed);

}  // namespace dflash::ggml_plugin
