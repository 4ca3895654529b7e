// Maps anonymous memory.
// SPDX-License-Identifier: Apache-2.0
#include "transport/ring/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace dflash::transport {

Result<Mapping> Mapping::create(size_t num_bytes) {
  void* const base = ::mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return Error{ErrorCode::kOutOfMemory, "cannot map " + std::to_string(num_bytes) +
                                              " bytes of slot memory: " + std::strerror(errno) +
                                              "; lower the batch capacity or the number of slots"};
  }
  Mapping mapping;
  mapping.base_ = static_cast<std::byte*>(base);
  mapping.num_bytes_ = num_bytes;
  return mapping;
}

Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, num_bytes_);
}

}  // namespace dflash::transport
