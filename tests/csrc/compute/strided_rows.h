// Rows in memory as a caller of the row operators has them: any dtype, with a gap behind each row
// that nobody may write.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <limits>
#include <random>
#include <vector>

#include "base/dtype.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

class StridedRows {
 public:
  static constexpr size_t kGap = 3;  // elements behind each row
  static constexpr std::byte kFiller{0xa5};

  StridedRows(Dtype dtype, uint32_t num_rows, uint32_t width)
      : dtype_(dtype),
        num_rows_(num_rows),
        width_(width),
        stride_((width + kGap) * dtype_bytes(dtype)),
        bytes_(stride_ * num_rows, kFiller) {}

  RowsView view() const { return {bytes_.data(), dtype_, stride_, num_rows_}; }
  RowsView row_view(uint32_t row) const {
    return {bytes_.data() + row * stride_, dtype_, stride_, 1};
  }
  RowsTarget target() { return {bytes_.data(), dtype_, stride_}; }
  RowsTarget row_target(uint32_t row) { return {bytes_.data() + row * stride_, dtype_, stride_}; }

  // Rounds the values to the dtype.
  void set(uint32_t row, const std::vector<float>& values) {
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype_,
            bytes_.data() + row * stride_, width_);
  }
  std::vector<float> get(uint32_t row) const {
    std::vector<float> values(width_);
    widen(dtype_, bytes_.data() + row * stride_, values.data(), width_);
    return values;
  }
  // Whether a row has the bits that `values` have in its dtype.
  bool has(uint32_t row, const std::vector<float>& values) const {
    StridedRows other(dtype_, 1, width_);
    other.set(0, values);
    return std::equal(other.bytes_.begin(), other.bytes_.end() - gap_bytes(),
                      bytes_.begin() + static_cast<std::ptrdiff_t>(row * stride_));
  }
  bool gaps_are_untouched() const {
    for (size_t row = 0; row < num_rows_; ++row) {
      const auto end = bytes_.begin() + static_cast<std::ptrdiff_t>((row + 1) * stride_);
      if (!std::all_of(end - gap_bytes(), end, [](std::byte b) { return b == kFiller; }))
        return false;
    }
    return true;
  }
  bool operator==(const StridedRows&) const = default;

 private:
  std::ptrdiff_t gap_bytes() const {
    return static_cast<std::ptrdiff_t>(kGap * dtype_bytes(dtype_));
  }

  Dtype dtype_;
  uint32_t num_rows_, width_;
  size_t stride_;
  std::vector<std::byte> bytes_;
};

// Normal values; the third and fourth row are scaled by 1e-4 and 1e4, and from the fifth row on
// every fifth has special values among them.
inline std::vector<float> probe_row(uint32_t row, uint32_t width, uint32_t seed) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  static constexpr float kSpecial[] = {
      kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), -0.0f, 1e-41f, 3e38f, -3e38f};
  std::mt19937 random(seed * 1000 + row);
  std::normal_distribution<float> normal;
  std::vector<float> values(width);
  for (float& value : values) value = normal(random) * (row == 2 ? 1e-4f : row == 3 ? 1e4f : 1.0f);
  if (row >= 4 && row % 5 == 4) values[row * 7 % width] = kSpecial[row / 5 % std::size(kSpecial)];
  return values;
}

inline StridedRows probe_rows(Dtype dtype, uint32_t num_rows, uint32_t width, uint32_t seed) {
  StridedRows rows(dtype, num_rows, width);
  for (uint32_t row = 0; row < num_rows; ++row) rows.set(row, probe_row(row, width, seed));
  return rows;
}

}  // namespace dflash::compute
