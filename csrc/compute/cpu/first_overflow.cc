// Keeps the least (row, column) of all values that overflowed.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/first_overflow.h"

#include <tuple>

#include "compute/experts/layer_checks.h"

namespace dflash::compute {

void FirstOverflow::keep(uint32_t row, uint32_t first_column, std::span<const float> values,
                         Dtype dtype) {
  for (uint32_t i = 0; i < values.size(); ++i) {
    if (!overflows(values[i], dtype)) continue;
    const Place found{row, first_column + i, values[i], dtype};
    const std::lock_guard lock(mutex_);
    if (!first_ || std::tie(found.row, found.column) < std::tie(first_->row, first_->column))
      first_ = found;
    return;
  }
}

Status FirstOverflow::take() {
  const std::lock_guard lock(mutex_);
  if (!first_) return ok();
  return range_error(first_->row, first_->column, first_->value, first_->dtype);
}

}  // namespace dflash::compute
