// What llama.cpp does with a backend, through its tables alone: it asks where weights may be
// loaded, loads them, asks which nodes of a graph a device runs, and computes those.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ggml_plugin/experts_model.h"
#include "ggml_plugin/fake_graph.h"
#include "ggml_plugin/registration.h"
#include "ggml_plugin/standin_client.h"

namespace dflash::ggml_plugin {

// The workers hold `held`; a program has made the plug-in's registration.
class FakeHost {
 public:
  explicit FakeHost(const ExpertsModel& held);
  ~FakeHost();

  dflash_moe_client& client() { return client_; }
  Registration& registration() { return *registration_; }
  ggml_backend_dev_t weight_device() { return device(0); }
  ggml_backend_dev_t device(size_t index = 1);

  // llama.cpp's question whether `tensor` may be loaded into the weight device's buffers.
  bool is_asked_for(const FileTensor& tensor, ggml_type type = GGML_TYPE_F32);
  // A new backend, freed at the end.
  ggml_backend_t backend();

 private:
  dflash_moe_client client_;
  std::unique_ptr<Registration> registration_;
  std::vector<ggml_backend_t> backends_;
};

// A model's tensors in a buffer of the weight device.
class LoadedModel {
 public:
  // Places and writes every tensor; `written`'s bytes where it has a tensor of that name.
  LoadedModel(FakeHost& host, const ExpertsModel& model, const ExpertsModel* written = nullptr);
  ~LoadedModel();

  ggml_tensor* tensor(const std::string& part_and_role) const;
  const ExpertsModel& model() const { return model_; }
  ggml_backend_buffer_t buffer() const { return buffer_; }

 private:
  const ExpertsModel& model_;
  ggml_backend_buffer_t buffer_;
  FakeGraph tensors_;
  std::map<std::string, ggml_tensor*> by_name_;
};

// The routing and input of one batch, and where ids and weights lie.
struct BatchOptions {
  uint32_t num_tokens = 3;
  uint32_t ids_width = 0;   // 0 is the model's top_k; llama.cpp's warm-up has num_experts
  uint32_t ids_stride = 0;  // elements from one token's ids to the next; 0 is ids_width
  unsigned seed = 7;
};

// The graph of a layer's experts as llama.cpp builds it, with its input.
struct ExpertsGraph {
  ExpertsGraph(const LoadedModel& loaded, const BatchOptions& options = {});
  // One of the products, with scale and bias where the model has them.
  ggml_tensor* product(const std::string& part, ggml_tensor* x);
  // All from the products to the result, which `result` then is.
  void build();
  void check_result() const;

  const LoadedModel& loaded;
  BatchOptions batch;
  FakeGraph graph;
  std::vector<float> x_values, weight_values;
  std::vector<int32_t> id_values;
  ggml_tensor *x, *ids, *weights, *result = nullptr;
  ggml_tensor *up = nullptr, *gate = nullptr, *weighted = nullptr;
};

// The first part of a graph that the scheduler gives to `device`: adjacent nodes that it supports,
// and the views between them.
std::vector<ggml_tensor*> nodes_for(ggml_backend_dev_t device, const FakeGraph& graph);

ggml_status compute(ggml_backend_t backend, ggml_cgraph graph);

// Computes nodes, which has to fail with a sentence that has `text` in it, and call nobody. Without
// nodes it takes the first part that the scheduler would give to the device.
void check_fails(FakeHost& host, FakeGraph& graph, std::vector<ggml_tensor*> nodes,
                 const std::string& text);
void check_fails(FakeHost& host, ExpertsGraph& experts, const std::string& text);

// What is written to the standard error meanwhile.
class CapturedErrors {
 public:
  CapturedErrors();
  ~CapturedErrors();
  std::string text();

 private:
  int saved_, file_;
};

}  // namespace dflash::ggml_plugin
