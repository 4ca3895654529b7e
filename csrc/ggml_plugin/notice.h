// What the plug-in says to whoever runs the program: sentences on the standard error. llama.cpp
// prints only that a graph failed, for every token anew, so the reason is said once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace dflash::ggml_plugin {

// Prints "dflash-moe: TEXT" unless this process has printed the same text before. At most
// kMostNotices different texts are printed, because some name tensors. Any thread.
void say_once(const std::string& text);

inline constexpr size_t kMostNotices = 64;

}  // namespace dflash::ggml_plugin
