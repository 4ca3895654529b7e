// Copies rows as they are: no value is converted. A step uses it to gather embeddings, cosines and
// sines, and to move parts of rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"

namespace dflash::compute {

// Rows that somebody else owns, of which `row_bytes` are read, `stride_bytes` apart.
struct ByteRows {
  const std::byte* data = nullptr;
  size_t stride_bytes = 0;
  size_t row_bytes = 0;
  size_t num_rows = 0;
};

// Writes each of `rows` to `out`, whose rows lie `out_stride_bytes` apart and overlap with none of
// them.
void copy_rows(const ByteRows& rows, std::byte* out, size_t out_stride_bytes);

// Writes rows ids[0], ids[1], ... of a table. Nothing is written on an error: kInvalidArgument
// naming `what` and the first id that is not in the table.
Status gather_rows(const char* what, const ByteRows& table, std::span<const int64_t> ids,
                   std::byte* out, size_t out_stride_bytes);

}  // namespace dflash::compute
