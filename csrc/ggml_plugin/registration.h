// The tables by which ggml knows this plug-in: two devices, their buffer types, and a backend each.
//
//   DFLASH_MOE_W   default buffers: weight_buffer.h. It answers where a weight may be loaded, and
//                  runs nothing.
//   DFLASH_MOE     default buffers: host_buffer.h. It runs the experts of graphs.
//
// Both are accelerators (ACCEL) to ggml: llama.cpp puts the buffer types of accelerators first in
// the list for the processor, where --cpu-moe and plain runs look, and adds a backend of each to
// every context.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ggml_plugin/ggml_headers.h"
#include "ggml_plugin/plan.h"
#include "ggml_plugin/recognize.h"

namespace dflash::ggml_plugin {

class Registration {
 public:
  // Takes over an open client and what it planned. Both live until the process ends, and the client
  // is never closed: ggml does not give its pointers back, other threads may compute while exit()
  // runs, and the library sends its last counters by itself.
  explicit Registration(Plan plan);
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  ggml_backend_reg_t reg() { return &reg_; }
  const Plan& plan() const { return plan_; }
  const Scope& scope() const { return scope_; }
  ggml_backend_dev_t weight_device() { return &weight_device_; }
  ggml_backend_dev_t device() { return &device_; }
  ggml_backend_buffer_type_t weight_type() { return &weight_type_; }
  ggml_backend_buffer_type_t host_type() { return &host_type_; }

 private:
  Plan plan_;
  ggml_backend_reg reg_;
  ggml_backend_device weight_device_, device_;
  ggml_backend_buffer_type weight_type_, host_type_;
  Scope scope_;
};

}  // namespace dflash::ggml_plugin
