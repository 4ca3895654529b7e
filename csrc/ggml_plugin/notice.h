// What the plug-in says to whoever runs the program: sentences on the standard error. llama.cpp
// prints only that a graph failed, for every token anew, so the reason is said once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <mutex>
#include <set>
#include <string>

namespace dflash::ggml_plugin {

inline constexpr size_t kMostNotices = 64;

// Prints "dflash-moe: TEXT" unless this process has printed the same text before. At most
// kMostNotices different texts are printed, because some name tensors. Any thread.
inline void say_once(const std::string& text) {
  // Both live until the process ends: another thread may speak while statics are destroyed.
  static std::mutex& mutex = *new std::mutex;
  static std::set<std::string>& said = *new std::set<std::string>;
  {
    const std::lock_guard lock(mutex);
    if (said.size() >= kMostNotices || !said.insert(text).second) return;
  }
  std::fprintf(stderr, "dflash-moe: %s\n", text.c_str());
}

}  // namespace dflash::ggml_plugin
