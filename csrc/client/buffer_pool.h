// Private byte buffers for replies. They are reused, so that a steady load allocates nothing. Used
// by one thread at a time, which has the turn (turn.h).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace dflash::client {

struct Buffer {
  std::unique_ptr<std::byte[]> bytes;
  size_t capacity = 0;
};

class BufferPool {
 public:
  // Returns a buffer of at least `num_bytes` with unspecified contents: the smallest kept one that
  // is large enough, otherwise a new one.
  Buffer take(size_t num_bytes) {
    size_t best = kept_.size();
    for (size_t i = 0; i < kept_.size(); ++i) {
      if (kept_[i].capacity >= num_bytes &&
          (best == kept_.size() || kept_[i].capacity < kept_[best].capacity))
        best = i;
    }
    if (best == kept_.size())
      return {std::make_unique_for_overwrite<std::byte[]>(num_bytes), num_bytes};
    Buffer taken = std::move(kept_[best]);
    kept_bytes_ -= taken.capacity;
    kept_[best] = std::move(kept_.back());
    kept_.pop_back();
    return taken;
  }

  // Keeps the buffer for later, or frees it where enough are kept already.
  void give_back(Buffer buffer) {
    if (buffer.bytes == nullptr || kept_.size() >= kMaxKept ||
        kept_bytes_ + buffer.capacity > kMaxKeptBytes)
      return;
    kept_bytes_ += buffer.capacity;
    kept_.push_back(std::move(buffer));
  }

 private:
  // More than the replies that one call has under way in practice.
  static constexpr size_t kMaxKept = 64;
  static constexpr size_t kMaxKeptBytes = size_t{64} << 20;  // memory that a client may hold idle
  std::vector<Buffer> kept_;
  size_t kept_bytes_ = 0;
};

}  // namespace dflash::client
