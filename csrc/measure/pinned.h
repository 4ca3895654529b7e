// Pins the calling thread to one processor for the length of a scope. Private to the benchmarks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sched.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/result.h"

namespace dflash::measure {

class Pinned {
 public:
  Pinned() = default;
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  ~Pinned() {
    if (is_pinned_) ::sched_setaffinity(0, sizeof before_, &before_);
  }

  // Pins the thread; a negative number leaves it where it is. Errors: kInvalidArgument.
  Status to(int cpu) {
    if (cpu < 0) return ok();
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    if (cpu < CPU_SETSIZE) CPU_SET(static_cast<size_t>(cpu), &wanted);
    if (::sched_getaffinity(0, sizeof before_, &before_) != 0 ||
        ::sched_setaffinity(0, sizeof wanted, &wanted) != 0) {
      return Error{ErrorCode::kInvalidArgument,
                   "cannot pin a thread to processor " + std::to_string(cpu) + ": " +
                       std::strerror(errno) + "; choose one this process may use"};
    }
    is_pinned_ = true;
    return ok();
  }

 private:
  cpu_set_t before_;
  bool is_pinned_ = false;
};

}  // namespace dflash::measure
