// What happens when a program loads the plug-in.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ggml_plugin/registration.h"

namespace dflash::ggml_plugin {

// The plug-in's registration; null, with a sentence on the standard error, where the program has to
// compute its experts itself. llama.cpp then says "failed to initialize backend" and goes on
// without.
//
// It loads all backends again whenever it meets certain options, and takes a registration that it
// knows for the same; so every call gives the first one's answer, and a failed start is not tried
// again. `caller` is an address in ggml's code.
Registration* initialize(const void* caller);

}  // namespace dflash::ggml_plugin
