// The backends that llama.cpp makes of the two devices, one of each per context.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ggml_plugin/ggml_headers.h"
#include "ggml_plugin/registration.h"

namespace dflash::ggml_plugin {

// A backend that computes graphs with the workers. ggml frees it through its table. Errors: null
// where there is no memory.
ggml_backend_t make_backend(Registration& registration);

// A backend that ggml has to be able to make of DFLASH_MOE_W, and that computes nothing.
ggml_backend_t make_weight_backend(Registration& registration);

}  // namespace dflash::ggml_plugin
