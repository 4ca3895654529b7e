// Sentences on the standard error, each once.
// SPDX-License-Identifier: Apache-2.0
#include "ggml_plugin/notice.h"

#include <cstdio>
#include <mutex>
#include <set>

namespace dflash::ggml_plugin {

void say_once(const std::string& text) {
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
