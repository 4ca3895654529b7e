// Plain memory for what the graph computes: inputs of the experts that come from elsewhere, and
// their results. ggml keeps a backend's activations in the default buffer type of its device, which
// is why there are two devices: one whose default type takes weights, and one with this.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ggml_plugin/ggml_headers.h"

namespace dflash::ggml_plugin {

// Any backend of the processor may read and write such buffers, so nothing is copied on a host
// without other devices. `device` is the type's owner.
void fill_host_buffer_type(ggml_backend_buffer_type* type, ggml_backend_dev_t device);

// Whether the processor may read the type's tensors where they lie.
bool is_host_memory(ggml_backend_buffer_type_t type);

}  // namespace dflash::ggml_plugin
