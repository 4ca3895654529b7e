// The one symbol that the plug-in exports; ggml looks it up by this name.
// SPDX-License-Identifier: Apache-2.0
#include <new>

#include "ggml_plugin/registration.h"

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
  try {
    dflash::ggml_plugin::Registration* registration =
        dflash::ggml_plugin::initialize(__builtin_return_address(0));
    return registration ? registration->reg() : nullptr;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
