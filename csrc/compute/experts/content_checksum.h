// What the source bytes of an expert add up to: 64 bits, by which holders of one shard see that
// they hold the same numbers. Any flipped bit of a weight, a scale or a bias changes the value; the
// order in which bytes are read, the resident format, the instruction set, the number of threads
// and the kind of holder do not.
//
// Definition (normative). A tensor is the sum, modulo 2^64, of mix(mix(index) + checksum(line))
// over its lines: `checksum` is that of base/checksum.h, `mix` the finaliser of splitmix64. Lines
// are
//   - the row of one output, where its inputs lie together: line `output`;
//   - otherwise 64 neighbouring outputs (or those left) of one input, side by side: line
//     `output / 64 * inputs + input`;
//   - a row of scales lying apart: line 2^63 + row;
//   - a bias in pieces of 1024 elements (or those left), side by side: line `element / 1024`.
// Bytes between rows belong to no line. An expert is the chain h = mix(h ^ tensor) from h = 0 over
// gate, up, down, gate bias, up bias and down bias, 0 for a tensor that it has not; a shard is the
// same chain over its experts, ascending.
//
// Packing adds the lines of a panel just before it reads them, so that they come from memory once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
#include "compute/formats/matrix_checksum.h"

namespace dflash::compute {

// The matrices of one expert while they are read, in any order.
struct ExpertChecksum {
  MatrixChecksum gate, up, down;
  // With the biases of `weights`, which are read now.
  uint64_t finish(const ExpertWeights& weights) const;
};

// `experts`: one value for each expert of the shard, ascending.
uint64_t shard_checksum(std::span<const uint64_t> experts);

// Reads an expert's source bytes for nothing but the checksum, piece by piece, so that a caller can
// stop between two pieces: the background reader of mapped weights, or a host that compares its own
// copy. What the views refer to outlives the reader.
class ContentReader {
 public:
  explicit ContentReader(const ExpertWeights& weights) : weights_(weights) {}
  // Reads at least one line and, of further ones, about `num_bytes`. True once all is read. Errors:
  // kCheckpoint naming the file.
  Result<bool> read(size_t num_bytes);
  uint64_t value() const;  // after read() gave true

 private:
  Status read_outputs_of(const MatrixView& matrix, MatrixChecksum& sum, size_t num_bytes);

  const ExpertWeights weights_;
  ExpertChecksum sums_;
  uint32_t matrix_ = 0;       // 0 gate, 1 up, 2 down, 3: all are read
  uint32_t next_output_ = 0;  // of that matrix
  std::vector<std::byte> buffer_;
};

}  // namespace dflash::compute
