// Finds the value that an error names where tasks of several threads narrow rows: the first in the
// order of rows, then of columns, so that the error is the same whatever threads do.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "base/dtype.h"
#include "base/result.h"

namespace dflash::compute {

// Any thread.
class FirstOverflow {
 public:
  // Looks for values of a row that became infinite when they were narrowed to `dtype`; the first
  // of them lies in `first_column`.
  void keep(uint32_t row, uint32_t first_column, std::span<const float> values, Dtype dtype);
  // Errors: kRange "row R, column C: value ... exceeds the range of f16" where one was kept.
  Status take();

 private:
  struct Place {
    uint32_t row, column;
    float value;
    Dtype dtype;
  };
  std::mutex mutex_;
  std::optional<Place> first_;
};

}  // namespace dflash::compute
