// Groups rows and shares out their tiles, see attention_split.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/attention_split.h"

#include <algorithm>

#include "compute/cpu/attention_kernels.h"

namespace dflash::compute {
namespace {

// Floats of a group's rows, scores and outputs that one thread touches for each tile: 384 KiB leave
// room in a second-level cache of 1 MiB for keys, values and what is widened of them.
constexpr size_t kGroupFloats = 96 * 1024;
// States of single tiles, in floats: 64 MiB. Groups beyond that are computed by one task each.
constexpr size_t kMaxPartials = size_t{16} << 20;
// What a tile costs beside its rows, in rows: reading its keys and values from memory.
constexpr uint64_t kReadingRows = 8;
// Tasks per thread, so that threads end together within an eighth of their work.
constexpr uint64_t kTasksPerThread = 8;

uint32_t parts_of(uint32_t whole, uint32_t most) { return (whole + most - 1) / most; }

// The rows that a group may have.
uint32_t most_rows(const KvShape& shape) {
  const size_t row = size_t{shape.key_size} + 2 * size_t{shape.value_stride()} + kTileTokens;
  return static_cast<uint32_t>(std::clamp<size_t>(kGroupFloats / row, 1, kMaxAttentionRows));
}

// Adds the groups of one kv head of a sequence, those with the most keys first.
void add_groups(const AttentionPlan::Sequence& sequence, RowGroup group, uint32_t first_head,
                uint32_t num_heads, uint32_t most, const AttentionForm& form,
                std::vector<RowGroup>& groups) {
  const uint32_t head_parts = parts_of(num_heads, most);
  const uint32_t most_positions = std::max(1u, most / parts_of(num_heads, head_parts));
  const uint32_t row_parts = parts_of(sequence.num_rows, most_positions);
  for (uint32_t r = row_parts; r-- > 0;) {
    group.first_row = static_cast<uint32_t>(uint64_t{sequence.num_rows} * r / row_parts);
    group.num_rows =
        static_cast<uint32_t>(uint64_t{sequence.num_rows} * (r + 1) / row_parts) - group.first_row;
    const uint32_t first = sequence.first_position + group.first_row;
    group.first_tile = first_visible(first, form.window) / kTileTokens;
    group.num_tiles = (first + group.num_rows - 1) / kTileTokens + 1 - group.first_tile;
    for (uint32_t h = 0; h < head_parts; ++h) {
      group.first_head = first_head + num_heads * h / head_parts;
      group.num_heads = first_head + num_heads * (h + 1) / head_parts - group.first_head;
      groups.push_back(group);
    }
  }
}

uint64_t tile_cost(const RowGroup& group) { return group.size() + kReadingRows; }

// Cuts groups that cost more than `limit` into tasks.
void add_tasks(AttentionSplit& split, uint64_t limit, uint32_t value_stride) {
  for (uint32_t g = 0; g < split.groups.size(); ++g) {
    RowGroup& group = split.groups[g];
    const uint32_t most_tiles =
        static_cast<uint32_t>(std::clamp<uint64_t>(limit / tile_cost(group), 1, group.num_tiles));
    const size_t partials = state_floats(group.size(), value_stride) * group.num_tiles;
    group.num_tasks = parts_of(group.num_tiles, most_tiles);
    if (split.num_partials + partials > kMaxPartials) group.num_tasks = 1;
    group.first_partial = split.num_partials;
    if (group.num_tasks > 1) split.num_partials += partials;
    for (uint32_t t = 0; t < group.num_tasks; ++t) {
      const auto tile = [&](uint32_t task) {
        return static_cast<uint32_t>(uint64_t{group.num_tiles} * task / group.num_tasks);
      };
      split.tasks.push_back({g, group.first_tile + tile(t), tile(t + 1) - tile(t)});
    }
  }
}

}  // namespace

AttentionSplit split_attention(const AttentionPlan& plan, const KvShape& shape,
                               const AttentionForm& form, uint32_t num_heads,
                               uint32_t num_threads) {
  AttentionSplit split;
  const uint32_t heads = num_heads / shape.num_kv_heads, most = most_rows(shape);
  uint64_t cost = 0;
  for (uint32_t s = 0; s < plan.sequences().size(); ++s) {
    for (uint32_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const size_t first = split.groups.size();
      add_groups(plan.sequences()[s], RowGroup{.sequence = s}, kv_head * heads, heads, most, form,
                 split.groups);
      for (size_t g = first; g < split.groups.size(); ++g) {
        cost += tile_cost(split.groups[g]) * split.groups[g].num_tiles;
        split.max_rows = std::max(split.max_rows, split.groups[g].size());
      }
    }
  }
  const uint64_t limit = num_threads == 1 ? cost : cost / (num_threads * kTasksPerThread) + 1;
  add_tasks(split, limit, shape.value_stride());
  return split;
}

}  // namespace dflash::compute
