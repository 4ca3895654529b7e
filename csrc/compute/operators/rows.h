// Rows of activations that somebody else owns, as operators of a host read and write them. A view
// owns nothing, and the caller keeps the memory until the operator returns.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace dflash::compute {

// Rows of a tensor that somebody else owns: [num_rows, width], elements of a row adjacent.
struct RowsView {
  const std::byte* data = nullptr;
  Dtype dtype = Dtype::kF32;
  size_t stride_bytes = 0;
  uint32_t num_rows = 0;
};

// Where an operator writes its rows, likewise.
struct RowsTarget {
  std::byte* data = nullptr;
  Dtype dtype = Dtype::kF32;
  size_t stride_bytes = 0;
};

}  // namespace dflash::compute
