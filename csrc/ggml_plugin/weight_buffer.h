// The buffers in which llama.cpp "loads" the experts' weights. They are address space without
// memory: whatever is written is compared with what the workers hold and then dropped.
//
// llama.cpp decides per tensor where it goes. It asks the device of each buffer type whether it can
// compute an operation with the tensor, and takes the first one that says yes; a tensor that is
// refused here is loaded elsewhere, and the program computes with it itself. Once a tensor is
// placed, there is no such way back: a layer whose bytes were dropped and found wrong cannot be
// computed by anybody, so it fails.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "ggml_plugin/ggml_headers.h"
#include "ggml_plugin/plan.h"

namespace dflash::ggml_plugin {

// What became of one tensor in one buffer.
enum class Content : uint8_t { kUnseen, kVerified, kRefused };

// The answers of one loading of one model: a second model in the process has buffers of its own.
class WeightBuffer {
 public:
  // Errors: null where there is no address space.
  static std::unique_ptr<WeightBuffer> make(const Plan& plan, size_t num_bytes);
  ~WeightBuffer();
  WeightBuffer(const WeightBuffer&) = delete;
  WeightBuffer& operator=(const WeightBuffer&) = delete;

  void* base() const { return base_; }
  // Whether the workers stand in for `tensor`, which is being placed here. A sentence's end that
  // says why not; "" where they do.
  std::string place(const ggml_tensor& tensor) const;
  // Compares `size` bytes from `offset` on, which the program has read from its file.
  void write(const ggml_tensor& tensor, const void* data, size_t offset, size_t size);
  // Takes the tensor's verification back: its content is not what was compared.
  void spoil(const ggml_tensor& tensor, const std::string& reason);
  Content content(const Tensor& tensor) const {
    return contents_[tensor.position].load(std::memory_order_acquire);
  }
  // Why a tensor here was refused.
  std::string reason() const;

 private:
  WeightBuffer(const Plan& plan, void* base, size_t num_bytes);
  void refuse(const Tensor& tensor, const std::string& reason);

  const Plan& plan_;
  void* base_;
  size_t num_bytes_;
  std::unique_ptr<std::atomic<Content>[]> contents_;  // by Tensor::position
  mutable std::mutex mutex_;
  std::string reason_;  // the first one
};

// The buffer type, whose context is `plan`; both must outlive every buffer. `device` is its owner.
void fill_weight_buffer_type(ggml_backend_buffer_type* type, ggml_backend_dev_t device,
                             const Plan* plan);

// Whether llama.cpp, asking with the operation `question` where a weight may be loaded, shall load
// it into a buffer of `type`; the refusal of an expert's tensor is reported.
bool takes_weight(const Plan& plan, const ggml_backend_buffer_type* type,
                  const ggml_tensor* question);

// Why the layer's experts with `tensor` cannot be computed; "" where the tensor is verified.
std::string why_unverified(const Plan& plan, const ggml_tensor& tensor);

}  // namespace dflash::ggml_plugin
