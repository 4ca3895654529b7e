// Keeps the process's signal handlers its own while foreign code is loaded. Libraries may take
// signals over from a constructor: that of PSM, which some packages of libfabric are linked with,
// ends the process where Ctrl-C or SIGTERM comes, or a mapped file turns out shorter than it was.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <csignal>
#include <cstddef>
#include <vector>

namespace dflash {

// Its end puts back every handler that has changed since it was made. What another thread has set
// meanwhile is undone too, so that it lives for no longer than the foreign code takes.
class KeptSignalHandlers {
 public:
  KeptSignalHandlers() : handlers_(NSIG) {
    for (int number = 1; number < NSIG; ++number)
      if (::sigaction(number, nullptr, &handlers_[at(number)]) != 0)
        handlers_[at(number)].sa_handler = SIG_ERR;
  }
  ~KeptSignalHandlers() {
    for (int number = 1; number < NSIG; ++number) {
      const struct sigaction& kept = handlers_[at(number)];
      struct sigaction present{};
      if (kept.sa_handler == SIG_ERR || ::sigaction(number, nullptr, &present) != 0) continue;
      if (present.sa_handler != kept.sa_handler) ::sigaction(number, &kept, nullptr);
    }
  }
  KeptSignalHandlers(const KeptSignalHandlers&) = delete;
  KeptSignalHandlers& operator=(const KeptSignalHandlers&) = delete;

 private:
  static size_t at(int number) { return static_cast<size_t>(number); }

  std::vector<struct sigaction> handlers_;
};

}  // namespace dflash
