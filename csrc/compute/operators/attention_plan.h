// Which rows one step of attention computes: for each sequence its block table and the positions of
// its rows. A plan is made once per step and read by every layer.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"

namespace dflash::compute {

// Consecutive rows of one sequence, at positions first_position, first_position + 1, ...
struct SequenceRows {
  std::span<const int32_t> block_table;  // block_table[i] has the tokens from position 16 * i on
  uint32_t first_position = 0;
  uint32_t num_rows = 0;
};

// Owns copies of the block tables. It does not change, so that any thread may read it.
class AttentionPlan {
 public:
  struct Sequence {
    uint32_t first_entry;  // of its block table in tables()
    uint32_t first_position;
    uint32_t num_rows;
    uint32_t first_row;  // rows are packed one sequence after another
  };

  // Errors: kInvalidArgument naming the sequence whose table is too short for its last position or
  // has a negative block, whose last position is 2^31 - 1 or more, or that has no rows.
  static Result<AttentionPlan> create(std::span<const SequenceRows> sequences);

  std::span<const Sequence> sequences() const { return sequences_; }
  const int32_t* block_table(const Sequence& sequence) const {
    return tables_.data() + sequence.first_entry;
  }
  uint32_t num_rows() const { return num_rows_; }
  // The highest block of any table up to its last position; -1 without sequences.
  int32_t max_block() const { return max_block_; }

 private:
  std::vector<Sequence> sequences_;
  std::vector<int32_t> tables_;
  uint32_t num_rows_ = 0;
  int32_t max_block_ = -1;
};

}  // namespace dflash::compute
