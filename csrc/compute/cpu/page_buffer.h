// Anonymous memory for packed weights, keys and values, and scratch, zeroed on first touch. Large
// blocks are aligned to 2 MiB and offered to huge pages, because every decode step reads the
// weights end to end and would miss the TLB every 4 KiB with small pages. Blocks that are too small
// for that lie side by side in a PageArena.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

#include "base/result.h"

namespace dflash::compute {

// Owns its memory, or its share of an arena's. Moving it leaves the source empty.
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
  ~PageBuffer() = default;

  std::byte* data() const { return data_; }
  size_t num_bytes() const { return num_bytes_; }
  // Gives the whole pages within [offset, offset + num_bytes) back to the system. Whoever reads
  // there afterwards, or is reading, finds zeros.
  void forget(size_t offset, size_t num_bytes) const;

 private:
  friend class PageArena;
  // The pages themselves, which are unmapped with the last block that lies in them.
  class Mapping;

  void swap(PageBuffer& other) {
    mapping_.swap(other.mapping_);
    std::swap(data_, other.data_);
    std::swap(num_bytes_, other.num_bytes_);
  }

  std::shared_ptr<const Mapping> mapping_;
  std::byte* data_ = nullptr;  // aligned, somewhere inside the mapping
  size_t num_bytes_ = 0;
};

// Places blocks that live about equally long behind each other, so that they share huge pages: the
// dense weights of a model's layers, of which most have 1 to 8 MiB. Pages return to the system once
// no block lies in their region. Any thread may call; blocks may outlive the arena.
class PageArena {
 public:
  // Returns a block at an address that is a multiple of 64. Errors: kOutOfMemory.
  Result<PageBuffer> take(size_t num_bytes);

 private:
  std::mutex mutex_;
  PageBuffer region_;     // the one that is being filled; guarded by mutex_
  size_t num_taken_ = 0;  // bytes of it; guarded by mutex_
};

}  // namespace dflash::compute
