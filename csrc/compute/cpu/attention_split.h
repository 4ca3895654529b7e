// How a step's attention is cut into tasks for threads. A cut changes no bit: rows are independent
// of each other, and where several tasks share the tiles of a row, each tile's state is kept and
// they are merged in order. Index arithmetic only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "compute/operators/attention.h"
#include "compute/operators/attention_plan.h"
#include "compute/operators/paged_kv.h"

namespace dflash::compute {

// Rows that one kernel call takes: consecutive query heads of one kv head at consecutive positions
// of one sequence, position by position.
struct RowGroup {
  uint32_t sequence = 0;
  uint32_t first_head = 0, num_heads = 0;  // query heads
  uint32_t first_row = 0, num_rows = 0;    // rows of the sequence
  uint32_t first_tile = 0, num_tiles = 0;  // tiles with a key that one of them sees
  // Where the states of its tiles lie among those of all groups that several tasks share, in
  // floats; and how many tasks do. With one task there are none.
  size_t first_partial = 0;
  uint32_t num_tasks = 0;

  uint32_t size() const { return num_heads * num_rows; }
};

// Some tiles of a group.
struct AttentionTask {
  uint32_t group;
  uint32_t first_tile, num_tiles;
};

struct AttentionSplit {
  std::vector<RowGroup> groups;
  std::vector<AttentionTask> tasks;
  uint32_t max_rows = 0;    // of any group
  size_t num_partials = 0;  // floats
};

// Floats of one tile's state of `num_rows` rows, in whole lines.
constexpr size_t state_floats(uint32_t num_rows, uint32_t value_stride) {
  return size_t{num_rows} * value_stride + (size_t{2} * num_rows + 15) / 16 * 16;
}

// Cuts a step for `num_threads` threads. Every row of every query head is in one group.
AttentionSplit split_attention(const AttentionPlan& plan, const KvShape& shape,
                               const AttentionForm& form, uint32_t num_heads, uint32_t num_threads);

}  // namespace dflash::compute
