// Anonymous memory for packed weights and scratch: zeroed on first touch, 2 MiB aligned and offered
// to huge pages when large (weights are read end to end in every decode step; small pages would
// cost a TLB miss each 4 KiB).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include "base/result.h"

namespace dflash::compute {

class PageBuffer {
 public:
  PageBuffer() = default;
  // Errors: kOutOfMemory naming the bytes asked for.
  static Result<PageBuffer> create(size_t num_bytes);
  PageBuffer(PageBuffer&& other) noexcept { swap(other); }
  PageBuffer& operator=(PageBuffer&& other) noexcept {
    PageBuffer taken(std::move(other));
    swap(taken);
    return *this;
  }
  PageBuffer(const PageBuffer&) = delete;
  PageBuffer& operator=(const PageBuffer&) = delete;
  ~PageBuffer();

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }

 private:
  void swap(PageBuffer& other) {
    std::swap(mapping_, other.mapping_);
    std::swap(mapping_bytes_, other.mapping_bytes_);
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
  }

  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::byte* data_ = nullptr;  // aligned, inside the mapping
  size_t num_bytes_ = 0;
};

}  // namespace dflash::compute
