// A mapped file that is no file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstring>

#include "compute/experts/expert_layer.h"

namespace dflash::compute::toy {

// A file whose mapping is the memory it is asked for, by any thread; fails from the `num_good`-th
// copy on, and while it is gone.
class MemoryFile final : public MappedBytes {
 public:
  explicit MemoryFile(uint32_t num_good = UINT32_MAX) : num_good_(num_good) {}
  Status copy(const std::byte* from, size_t num_bytes, std::byte* to) const override {
    if (is_gone || num_copies_++ >= num_good_)
      return Error{ErrorCode::kCheckpoint, "model.safetensors: ends early"};
    std::memcpy(to, from, num_bytes);
    return ok();
  }
  uint32_t num_copies() const { return num_copies_; }
  std::atomic<bool> is_gone{false};

 private:
  uint32_t num_good_;
  mutable std::atomic<uint32_t> num_copies_{0};
};

inline ExpertWeights in_file(ExpertWeights weights, const MappedBytes& file) {
  weights.gate.file = weights.up.file = weights.down.file = &file;
  return weights;
}

}  // namespace dflash::compute::toy
