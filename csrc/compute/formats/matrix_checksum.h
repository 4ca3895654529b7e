// What the source bytes of one tensor add up to, line by line, as they are packed. What a line is,
// and what the sum is for: experts/content_checksum.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// A bijection of 64 bits in which each bit depends on all (splitmix64's finaliser, Steele, Lea and
// Flood, "Fast splittable pseudorandom number generators"): two changed values do not cancel but by
// chance.
uint64_t mix_bits(uint64_t value);

// The sum of one matrix's lines, as far as they were added.
class MatrixChecksum {
 public:
  // The lines that begin in outputs [first, first + count) of a matrix; each may be added once.
  // `part` is a view of the matrix's outputs from `part_begin` on, to the end of these lines.
  void add(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t count);
  uint64_t value() const { return sum_; }

 private:
  void add_rows(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  void add_columns(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  void add_scales(const MatrixView& part, uint32_t part_begin, uint32_t first, uint32_t end);
  uint64_t sum_ = 0;
};

// Outputs that begin a line together, and a row of scales: add() in multiples of it reads no output
// twice.
uint32_t outputs_per_line(const MatrixView& matrix);

uint64_t vector_checksum(const VectorView& vector);

}  // namespace dflash::compute
