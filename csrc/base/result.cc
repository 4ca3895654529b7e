// The words of a failed system call. A lack of descriptors is the one cause that a user can mend at
// once, so that it gets the remedy.
// SPDX-License-Identifier: Apache-2.0
#include "base/result.h"

#include <sys/resource.h>

#include <cstring>

namespace dflash {

Error system_error(const std::string& what, int error_number) {
  std::string message = what + ": " + std::strerror(error_number);
  if (error_number == EMFILE || error_number == ENFILE) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    message += "; this process may have " + std::to_string(limit.rlim_cur) +
               " open files and sockets; raise that with `ulimit -n 1024` before it starts";
  }
  const bool lacks_memory = error_number == ENOMEM || error_number == ENOSPC;
  return {lacks_memory ? ErrorCode::kOutOfMemory : ErrorCode::kSystem, std::move(message)};
}

}  // namespace dflash
