// The tables by which ggml knows this plug-in: two devices, their buffer types, and a backend each.
//
//   DFLASH_MOE_W   default buffers: weight_buffer.h. It answers where a weight may be loaded, and
//                  runs nothing.
//   DFLASH_MOE     default buffers: host_buffer.cc. It runs the experts of graphs.
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

// Fills the type of plain memory for what the graph computes (host_buffer.cc): inputs of the
// experts that come from elsewhere, and their results. ggml keeps a backend's activations in the
// default buffer type of its device, which is why there are two devices: one whose default type
// takes weights, and one with this. Any backend of the processor may read and write such buffers,
// so nothing is copied on a host without other devices. `device` is the type's owner.
void fill_host_buffer_type(ggml_backend_buffer_type* type, ggml_backend_dev_t device);

// Whether the processor may read the type's tensors where they lie.
bool is_host_memory(ggml_backend_buffer_type_t type);

// A backend that computes graphs with the workers, one per context (backend.cc). ggml frees it
// through its table. Errors: null where there is no memory.
ggml_backend_t make_backend(Registration& registration);

// A backend that ggml has to be able to make of DFLASH_MOE_W, and that computes nothing.
ggml_backend_t make_weight_backend(Registration& registration);

// What happens when a program loads the plug-in (initialize.cc). Returns the plug-in's
// registration; null, with a sentence on the standard error, where the program has to compute its
// experts itself. llama.cpp then says "failed to initialize backend" and goes on without.
//
// It loads all backends again whenever it meets certain options, and takes a registration that it
// knows for the same; so every call gives the first one's answer, and a failed start is not tried
// again. `caller` is an address in ggml's code.
Registration* initialize(const void* caller);

}  // namespace dflash::ggml_plugin
