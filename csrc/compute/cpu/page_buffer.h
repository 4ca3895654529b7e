// Anonymous memory for packed weights, keys and values, and scratch, zeroed on first touch. Large
// blocks are aligned to 2 MiB and offered to huge pages, because every decode step reads the
// weights end to end and would miss the TLB every 4 KiB with small pages.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <utility>

#include "base/result.h"

namespace dflash::compute {

// Owns its mapping; moving it leaves the source empty.
class PageBuffer {
 public:
  PageBuffer() = default;
  // Errors: kOutOfMemory naming the bytes asked for. Zero bytes give an empty buffer.
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
  std::byte* data_ = nullptr;  // aligned, somewhere inside the mapping
  size_t num_bytes_ = 0;
};

}  // namespace dflash::compute
