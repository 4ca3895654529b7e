// Where the keys and values of one layer lie. They are kept in blocks of 16 tokens, in the order in
// which the attention kernels read them: of a key, lanes are tokens; of a value, lanes are its own
// elements. This is index arithmetic only; kv_layer.h owns the memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace dflash::compute {

// Tokens of one block, as many as the partial sums of a tile (attention.h) and the lanes of the
// widest vectors.
inline constexpr uint32_t kBlockTokens = 16;

// keys   [num_kv_heads][num_blocks][key_size][16]
// values [num_kv_heads][num_blocks][16][value_stride], of which value_size are the value's
//
// A head's blocks lie together, so that a sequence whose blocks follow each other is one long read
// per head: on Zen 5, 4 KiB of every 8 KiB come at three quarters of its speed.
struct KvShape {
  uint32_t num_blocks = 0;
  uint32_t num_kv_heads = 0;
  uint32_t key_size = 0;
  uint32_t value_size = 0;
  Dtype dtype = Dtype::kF32;

  // A row of values is a whole number of the widest vectors, so that no kernel has a remainder.
  constexpr uint32_t value_stride() const {
    return (value_size + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
  }
  // Bytes of one block of one head.
  constexpr size_t key_block_bytes() const {
    return size_t{kBlockTokens} * key_size * dtype_bytes(dtype);
  }
  constexpr size_t value_block_bytes() const {
    return size_t{kBlockTokens} * value_stride() * dtype_bytes(dtype);
  }
  // Where the block of a head begins.
  constexpr size_t key_offset(size_t block, size_t kv_head) const {
    return (kv_head * num_blocks + block) * key_block_bytes();
  }
  constexpr size_t value_offset(size_t block, size_t kv_head) const {
    return (kv_head * num_blocks + block) * value_block_bytes();
  }
  constexpr size_t key_bytes() const {
    return size_t{num_blocks} * num_kv_heads * key_block_bytes();
  }
  constexpr size_t value_bytes() const {
    return size_t{num_blocks} * num_kv_heads * value_block_bytes();
  }
};

// The keys and values of a layer, in memory that somebody else owns.
struct KvView {
  KvShape shape;
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;

  const std::byte* key_block(size_t block, size_t kv_head) const {
    return keys + shape.key_offset(block, kv_head);
  }
  const std::byte* value_block(size_t block, size_t kv_head) const {
    return values + shape.value_offset(block, kv_head);
  }
};

}  // namespace dflash::compute
