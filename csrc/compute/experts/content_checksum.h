// What the source bytes of an expert add up to: 64 bits by which the holders of one shard see that
// they hold the same numbers. Any flipped bit of a weight, a scale or a bias changes the value. The
// order in which bytes are read, the resident format, the instruction set, the number of threads
// and the kind of holder do not.
//
// Definition (normative). A tensor is the sum, modulo 2^64, of mix(mix(index) + checksum(line))
// over its lines: `checksum` is that of base/checksum.h, `mix` the finaliser of splitmix64. Lines
//   - the row of one output, where its inputs lie together; its index is `output`;
//   - otherwise 64 neighbouring outputs (or those left) of one input, side by side; the index is
//     `output / 64 * inputs + input`;
//   - a row of scales that lie apart; the index is 2^63 + row;
//   - a bias in pieces of 1024 elements (or those left), side by side; the index is
//     `element / 1024`.
// Bytes between rows belong to no line. An expert is the chain h = mix(h ^ tensor) from h = 0 over
// gate, up, down, gate bias, up bias and down bias, with 0 for a tensor that it does not have. A
// shard is the same chain over its experts, ascending.
//
// Packing adds the lines of a panel just before it reads them, so that they come from memory once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
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

// The sums of one expert's matrices while they are being read, in any order.
struct ExpertChecksum {
  MatrixChecksum gate, up, down;
  // The checksum of the expert. It adds the biases of `weights`, which are read here.
  uint64_t finish(const ExpertWeights& weights) const;
};

// The checksum of a shard; `experts` has one value for each of its experts, ascending.
uint64_t shard_checksum(std::span<const uint64_t> experts);

// Reads an expert's source bytes only for the checksum, piece by piece, so that a caller can stop
// between two pieces. Its callers are the background reader of mapped weights and a host that
// compares its own copy. What the views refer to must outlive the reader. Not thread-safe.
class ContentReader {
 public:
  explicit ContentReader(const ExpertWeights& weights) : weights_(weights) {}
  // Reads about `num_bytes` more, but at least one line. Returns true once all has been read.
  // Errors: kCheckpoint naming the file.
  Result<bool> read(size_t num_bytes);
  uint64_t value() const;  // valid after read() has returned true

 private:
  Status read_outputs_of(const MatrixView& matrix, MatrixChecksum& sum, size_t num_bytes);

  const ExpertWeights weights_;
  ExpertChecksum sums_;
  uint32_t matrix_ = 0;       // 0 gate, 1 up, 2 down; 3 when all have been read
  uint32_t next_output_ = 0;  // of that matrix
  std::vector<std::byte> buffer_;
};

}  // namespace dflash::compute
