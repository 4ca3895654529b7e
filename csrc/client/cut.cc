// SPDX-License-Identifier: Apache-2.0
#include "client/cut.h"

#include <limits>

#include "client/encode.h"

namespace dflash::client {
namespace {

// Walks a shard's rows once, appending parts.
class Cutter {
 public:
  Cutter(Call& call, uint32_t shard_index, uint32_t worker, const CutLimits& limits)
      : call_(call),
        plan_(call.layer->plan),
        rows_(call.work->shard_rows[shard_index]),
        limits_(limits) {
    next_.call = &call;
    next_.shard_index = shard_index;
    next_.worker = worker;
    next_.request_dtype = limits.request_dtype;
    next_.reply_dtype = limits.reply_dtype;
  }

  // Appends the parts of the rows from where the last range ended up to those of tokens below
  // `token_end`.
  Status cut_range(uint32_t token_end) {
    uint32_t row_end = next_.row_end;
    while (row_end < rows_.tokens.size() && rows_.tokens[row_end] < token_end) ++row_end;
    for (bool is_first = true; next_.row_end < row_end; is_first = false) {
      DFLASH_TRY(append(row_end));
      if (!is_first) ++num_splits_;
    }
    return ok();
  }
  uint64_t num_splits() const { return num_splits_; }

 private:
  // Appends one part: the rows up to `row_end`, or the largest half of a half of them that fits.
  Status append(uint32_t row_end) {
    next_.row_begin = next_.row_end;
    next_.pair_begin = next_.pair_end;
    for (uint32_t num_rows = row_end - next_.row_begin;; num_rows = (num_rows + 1) / 2) {
      next_.row_end = next_.row_begin + num_rows;
      next_.pair_end = next_.pair_begin;
      for (uint32_t row = next_.row_begin; row < next_.row_end; ++row)
        next_.pair_end += rows_.row_counts[row];
      if (fits()) break;
      if (num_rows == 1) {
        return Error{ErrorCode::kInvalidArgument,
                     "layer " + plan_.name + ": a row with " + std::to_string(next_.num_pairs()) +
                         " experts does not fit a slot of " +
                         std::to_string(limits_.slot.request_bytes) + " + " +
                         std::to_string(limits_.slot.reply_bytes) +
                         " bytes; raise ipc.shared_bytes"};
      }
    }
    if (num_parts_ > std::numeric_limits<uint16_t>::max()) {
      return Error{
          ErrorCode::kInvalidArgument,
          "layer " + plan_.name + ": " + std::to_string(call_.work->batch.num_tokens) +
              " tokens make more than 65536 slices; submit fewer tokens or raise the slice"};
    }
    next_.slice = static_cast<uint16_t>(num_parts_++);
    Part& part = call_.work->parts.emplace_back();
    part.call = next_.call;
    part.shard_index = next_.shard_index;
    part.worker = next_.worker;
    part.slice = next_.slice;
    part.request_dtype = next_.request_dtype;
    part.reply_dtype = next_.reply_dtype;
    part.row_begin = next_.row_begin;
    part.row_end = next_.row_end;
    part.pair_begin = next_.pair_begin;
    part.pair_end = next_.pair_end;
    return ok();
  }
  bool fits() const {
    const uint64_t request =
        request_message_bytes(plan_, next_.num_rows(), next_.num_pairs(), next_.request_dtype);
    const uint64_t reply = reply_message_bytes(plan_, next_.num_rows(), next_.reply_dtype);
    return request != 0 && reply != 0 && request <= limits_.slot.request_bytes &&
           reply <= limits_.slot.reply_bytes;
  }

  Call& call_;
  const LayerPlan& plan_;
  const ShardRows& rows_;
  const CutLimits& limits_;
  Part next_;
  uint32_t num_parts_ = 0;
  uint64_t num_splits_ = 0;
};

}  // namespace

Result<uint64_t> cut_shard(Call& call, uint32_t shard_index, uint32_t worker,
                           const CutLimits& limits) {
  const uint32_t num_tokens = call.work->batch.num_tokens;
  const uint32_t num_ranges = num_slices(num_tokens, limits.slice_tokens);
  Cutter cutter(call, shard_index, worker, limits);
  for (uint32_t i = 0; i < num_ranges; ++i)
    DFLASH_TRY(cutter.cut_range(slice_end(num_tokens, num_ranges, i)));
  return cutter.num_splits();
}

}  // namespace dflash::client
