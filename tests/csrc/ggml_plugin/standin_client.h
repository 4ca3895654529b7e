// An implementation of dflash_moe.h inside the test: it computes with the reference of
// csrc/compute, and tells what it was asked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "c_interface/dflash_moe.h"
#include "ggml_plugin/experts_model.h"

struct dflash_moe_client {
  // Adds a layer and all of its tensors. `model` must outlive the client.
  void hold(const dflash::ggml_plugin::ExpertsModel& model);
  // From now on every call ends like this; DFLASH_MOE_OK lets them compute again.
  void fail_with(int status, const std::string& text);

  struct HeldTensor {
    dflash_moe_tensor facts;
    const dflash::ggml_plugin::FileTensor* tensor;
  };
  struct HeldLayer {
    dflash_moe_layer facts;
    std::vector<float> gate, up, down;
    std::unique_ptr<dflash::compute::ExpertLayer> experts;
  };

  std::mutex mutex;  // guards all below once threads call
  std::vector<HeldTensor> tensors;
  std::vector<std::unique_ptr<HeldLayer>> layers;
  std::vector<std::pair<std::string, std::string>> reports;  // name, reason or ""
  int failure = DFLASH_MOE_OK;
  std::string failure_text;
  bool fails_at_submit = false;
  bool is_stub = false;  // tensors with the right bytes count as read from a stub
  int num_calls = 0, num_open_calls = 0;
  uint32_t last_top_k = 0;
  const float* last_output = nullptr;
};
