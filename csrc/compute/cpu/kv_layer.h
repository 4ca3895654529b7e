// The keys and values of one layer in pages of a host, and what writes them. Whoever schedules
// steps sees to it that nobody reads a block while it is written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "base/result.h"
#include "compute/cpu/page_buffer.h"
#include "compute/operators/paged_kv.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

class KvLayer {
 public:
  // Memory is mapped and becomes resident as blocks are written. Errors: kInvalidArgument naming a
  // size that is zero or too large, kOutOfMemory.
  static Result<KvLayer> create(const KvShape& shape);

  const KvShape& shape() const { return shape_; }
  KvView view() const { return {shape_, keys_.data(), values_.data()}; }
  uint64_t num_bytes() const { return keys_.num_bytes() + values_.num_bytes(); }

  // Stores row i of `keys` [num_rows, num_kv_heads * key_size] and of `values` [num_rows,
  // num_kv_heads * value_size] at slots[i] = block * 16 + offset, each value rounded once to the
  // layer's dtype. All slots are checked before any is written. Errors: kInvalidArgument naming a
  // slot that does not exist or counts that differ; kRange naming the first row with a finite value
  // that became infinite, after all rows were written.
  Status append(std::span<const int64_t> slots, const RowsView& keys, const RowsView& values);

  // Copies the keys and values of one block over another's. Errors: kInvalidArgument.
  Status copy_block(uint32_t from, uint32_t to);

 private:
  explicit KvLayer(const KvShape& shape) : shape_(shape) {}

  KvShape shape_;
  PageBuffer keys_, values_;  // as paged_kv.h says
};

}  // namespace dflash::compute
