// Row by row, because rows lie apart.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/row_copies.h"

#include <cstring>
#include <string>

namespace dflash::compute {

void copy_rows(const ByteRows& rows, std::byte* out, size_t out_stride_bytes) {
  for (size_t row = 0; row < rows.num_rows; ++row) {
    std::memcpy(out + row * out_stride_bytes, rows.data + row * rows.stride_bytes, rows.row_bytes);
  }
}

Status gather_rows(const char* what, const ByteRows& table, std::span<const int64_t> ids,
                   std::byte* out, size_t out_stride_bytes) {
  for (const int64_t id : ids) {
    if (id < 0 || static_cast<uint64_t>(id) >= table.num_rows) {
      return Error{ErrorCode::kInvalidArgument, std::string(what) + " " + std::to_string(id) +
                                                    " is outside of 0.." +
                                                    std::to_string(table.num_rows) + " - 1"};
    }
  }
  for (size_t row = 0; row < ids.size(); ++row) {
    std::memcpy(out + row * out_stride_bytes,
                table.data + static_cast<size_t>(ids[row]) * table.stride_bytes, table.row_bytes);
  }
  return ok();
}

}  // namespace dflash::compute
