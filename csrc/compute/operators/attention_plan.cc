// Checks and copies the sequences of a step, see attention_plan.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/attention_plan.h"

#include <algorithm>
#include <string>

#include "compute/operators/paged_kv.h"

namespace dflash::compute {
namespace {

// Positions and counts of rows stay below this, so that sums of two of them fit 32 bits.
constexpr uint64_t kMaxTokens = (uint64_t{1} << 31) - 1;

Error sequence_error(size_t sequence, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument, "sequence " + std::to_string(sequence) + " " + what};
}

// The entries of a table that its rows see.
Result<size_t> num_entries(const SequenceRows& rows, size_t sequence) {
  if (rows.num_rows == 0) return sequence_error(sequence, "has no rows");
  const uint64_t end = uint64_t{rows.first_position} + rows.num_rows;
  if (end > kMaxTokens)
    return sequence_error(sequence, "ends at position " + std::to_string(end) + ", beyond 2^31");
  const uint64_t entries = (end + kBlockTokens - 1) / kBlockTokens;
  if (entries > rows.block_table.size()) {
    return sequence_error(sequence, "has " + std::to_string(rows.block_table.size()) + " blocks; " +
                                        std::to_string(end) + " tokens need " +
                                        std::to_string(entries));
  }
  return static_cast<size_t>(entries);
}

}  // namespace

Result<AttentionPlan> AttentionPlan::create(std::span<const SequenceRows> sequences) {
  AttentionPlan plan;
  uint64_t num_rows = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SequenceRows& rows = sequences[i];
    const Result<size_t> entries = num_entries(rows, i);
    if (!entries.ok()) return Error(entries.error());
    const auto table = rows.block_table.first(entries.value());
    const auto [least, most] = std::minmax_element(table.begin(), table.end());
    if (*least < 0) return sequence_error(i, "has block " + std::to_string(*least));
    plan.max_block_ = std::max(plan.max_block_, *most);
    plan.sequences_.push_back({static_cast<uint32_t>(plan.tables_.size()), rows.first_position,
                               rows.num_rows, static_cast<uint32_t>(num_rows)});
    plan.tables_.insert(plan.tables_.end(), table.begin(), table.end());
    num_rows += rows.num_rows;
    if (num_rows > kMaxTokens || plan.tables_.size() > kMaxTokens)
      return sequence_error(i, "brings the step beyond 2^31 rows or blocks");
  }
  plan.num_rows_ = static_cast<uint32_t>(num_rows);
  return plan;
}

}  // namespace dflash::compute
