// What the source bytes of one tensor add up to, line by line, taken while they are packed.
// experts/content_checksum.h says what a line is and what the sum is for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// A bijection of 64 bits in which each bit of the result depends on all bits of the value, so that
// two changed lines cancel only by chance. This is splitmix64's finaliser (Steele, Lea and Flood,
// "Fast splittable pseudorandom number generators").
uint64_t mix_bits(uint64_t value);

// The sum of those lines of one matrix that have been added. Not thread-safe.
class MatrixChecksum {
 public:
  // Adds the lines that begin in outputs [first, first + count) of a matrix, each of which may be
  // added once. `part` is a view of the matrix's outputs from `part_begin` on, and reaches to the
  // end of these lines.
  void add(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t count);
  uint64_t value() const { return sum_; }

 private:
  void add_rows(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  void add_columns(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  void add_scales(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  uint64_t sum_ = 0;
};

// The outputs that begin a line or a row of scales together. Calls of add() in multiples of it read
// no output twice.
uint32_t outputs_per_line(const MatrixView& matrix);

// The sum of a bias; 0 where there is none.
uint64_t vector_checksum(const VectorView& vector);

}  // namespace dflash::compute
