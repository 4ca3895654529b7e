// Owns a private anonymous mapping: the slots of transports that share nothing with another
// process. Pages cost nothing until they are touched, so that slots may be sized for the worst
// case.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "base/result.h"

namespace dflash::transport {

class Mapping {
 public:
  // The memory is zeroed and page-aligned. Errors: kOutOfMemory.
  static Result<Mapping> create(size_t num_bytes);

  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : base_(std::exchange(other.base_, nullptr)),
        num_bytes_(std::exchange(other.num_bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(num_bytes_, other.num_bytes_);
    return *this;
  }
  ~Mapping();

  std::byte* base() const { return base_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  std::byte* base_ = nullptr;
  size_t num_bytes_ = 0;
};

inline Result<Mapping> Mapping::create(size_t num_bytes) {
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

inline Mapping::~Mapping() {
  if (base_ != nullptr) ::munmap(base_, num_bytes_);
}

}  // namespace dflash::transport
