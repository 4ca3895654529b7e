// Decides whether rows are better read from their file than through the mapping, and reads them.
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>

#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

// Bytes of one read: they stay in the second-level cache until they are used, and are worth a
// system call.
constexpr size_t kReadBytes = size_t{256} << 10;

// Bytes from the beginning of one output's row to that of the next.
size_t row_step_bytes(const MatrixView& matrix) {
  return static_cast<size_t>(matrix.output_stride) *
         (is_float(matrix.format) ? dtype_bytes(dtype_of(matrix.format)) : 1);
}

}  // namespace

uint32_t outputs_read_at_once(const MatrixView& matrix, uint32_t unit) {
  const size_t step = row_step_bytes(matrix), row = row_bytes(matrix.format, matrix.inputs);
  if (!is_plain(matrix))
    return std::max(static_cast<uint32_t>(kReadBytes / (row * unit)), 1u) * unit;
  if (matrix.file == nullptr || step < row || step > 2 * row ||
      (is_float(matrix.format) && matrix.input_stride != 1))
    return 0;
  const uint32_t scale_outputs = outputs_per_scale(matrix);
  if (scale_outputs % unit != 0 && unit % scale_outputs != 0) return 0;
  const uint32_t whole = std::max(scale_outputs, unit);
  return std::max(static_cast<uint32_t>(kReadBytes / (step * whole)), 1u) * whole;
}

Status read_outputs(uint32_t first, uint32_t count, MatrixView& part,
                    std::vector<std::byte>& read) {
  if (!is_plain(part)) {
    part = plain_rows(part, first, count, read);
    return ok();
  }
  const size_t step = row_step_bytes(part);
  const size_t num_bytes = (count - 1) * step + row_bytes(part.format, part.inputs);
  if (read.size() < num_bytes) read.resize(num_bytes);
  DFLASH_TRY(part.file->copy(part.data + first * step, num_bytes, read.data()));
  part.data = read.data();
  part.outputs = count;
  if (part.scales != nullptr) part.scales += first / outputs_per_scale(part) * part.scales_stride;
  return ok();
}

}  // namespace dflash::compute
