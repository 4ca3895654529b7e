// Cutting walks over a shard's rows once, since rows and token ranges both ascend.
// SPDX-License-Identifier: Apache-2.0
#include "client/cut.h"

#include <limits>
#include <utility>

#include "client/router.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

// Walks over a shard's rows once and appends slices.
class RowWalk {
 public:
  RowWalk(Call& call, uint32_t shard_index, uint32_t worker, const CutLimits& limits)
      : call_(call),
        shard_index_(shard_index),
        worker_(worker),
        limits_(limits),
        rows_(call.work->shard_rows[shard_index]) {}

  // Appends the slices of those rows that lie between the end of the last range and `token_end`.
  Status cut_range(uint32_t token_end) {
    uint32_t row_end = row_;
    while (row_end < rows_.tokens.size() && rows_.tokens[row_end] < token_end) ++row_end;
    for (bool is_first = true; row_ < row_end; is_first = false) {
      DFLASH_TRY(append(row_end));
      if (!is_first) ++num_splits_;
    }
    return ok();
  }
  uint64_t num_splits() const { return num_splits_; }

 private:
  // Appends one slice: the rows up to `row_end`, or as many as fit after halving them repeatedly.
  Status append(uint32_t row_end) {
    Slice& slice = call_.work->slices.emplace_back();
    slice.call = &call_;
    slice.shard_index = shard_index_;
    slice.worker = worker_;
    slice.request_dtype = limits_.request_dtype;
    slice.reply_dtype = limits_.reply_dtype;
    slice.row_begin = row_;
    slice.pair_begin = pair_;
    for (uint32_t num_rows = row_end - row_;; num_rows = (num_rows + 1) / 2) {
      slice.row_end = row_ + num_rows;
      slice.pair_end = pair_;
      for (uint32_t row = row_; row < slice.row_end; ++row) slice.pair_end += rows_.row_counts[row];
      if (fits(slice, limits_.slot)) break;
      if (num_rows == 1) {
        return refuse("a row with " + std::to_string(slice.num_pairs()) +
                      " experts does not fit a slot of " +
                      std::to_string(limits_.slot.request_bytes) + " + " +
                      std::to_string(limits_.slot.reply_bytes) + " bytes; raise ipc.shared_bytes");
      }
    }
    if (num_slices_ > std::numeric_limits<uint16_t>::max()) {
      return refuse(std::to_string(call_.work->batch.num_tokens) +
                    " tokens make more than 65536 slices; submit fewer tokens or raise the slice");
    }
    slice.index = static_cast<uint16_t>(num_slices_++);
    row_ = slice.row_end;
    pair_ = slice.pair_end;
    return ok();
  }
  Error refuse(const std::string& what) const {
    return Error{ErrorCode::kInvalidArgument, "layer " + call_.layer->plan.name + ": " + what};
  }

  Call& call_;
  const uint32_t shard_index_, worker_;
  const CutLimits& limits_;
  const ShardRows& rows_;
  uint32_t row_ = 0, pair_ = 0;  // one past those that were cut
  uint32_t num_slices_ = 0;
  uint64_t num_splits_ = 0;
};

}  // namespace

uint64_t request_message_bytes(const LayerPlan& plan, uint32_t num_rows, uint32_t num_pairs,
                               Dtype dtype) {
  const auto layout = wire::RequestLayout::of(num_rows, num_pairs, plan.in_size, dtype);
  return layout.ok() ? wire::kFrameHeaderBytes + layout.value().payload_bytes : 0;
}

uint64_t reply_message_bytes(const LayerPlan& plan, uint32_t num_rows, Dtype dtype) {
  const auto layout = wire::ReplyLayout::of(num_rows, plan.out_size, dtype);
  return layout.ok() ? wire::kFrameHeaderBytes + layout.value().payload_bytes : 0;
}

bool fits(const Slice& slice, const transport::SlotGeometry& slot) {
  const LayerPlan& plan = slice.call->layer->plan;
  const uint64_t request =
      request_message_bytes(plan, slice.num_rows(), slice.num_pairs(), slice.request_dtype);
  const uint64_t reply = reply_message_bytes(plan, slice.num_rows(), slice.reply_dtype);
  return request != 0 && reply != 0 && request <= slot.request_bytes && reply <= slot.reply_bytes;
}

Result<uint64_t> cut_shard(Call& call, uint32_t shard_index, uint32_t worker,
                           const CutLimits& limits) {
  const uint32_t num_tokens = call.work->batch.num_tokens;
  const uint32_t num_ranges = num_slices(num_tokens, limits.slice_tokens);
  RowWalk walk(call, shard_index, worker, limits);
  for (uint32_t i = 0; i < num_ranges; ++i)
    DFLASH_TRY(walk.cut_range(slice_end(num_tokens, num_ranges, i)));
  return walk.num_splits();
}

Status Cutter::cut(Call& call, Links links) {
  Status done = cut_all(call, links);
  for (const uint32_t holder : call.work->holders) links[holder]->cut_ns = 0;
  return done;
}

Status Cutter::cut_all(Call& call, Links links) {
  const LayerPlan& plan = call.layer->plan;
  call.work->holders.assign(plan.shards.size(), 0);
  call.work->forecasts.assign(plan.shards.size(), ChunkForecast());
  for (uint32_t s = 0; s < plan.shards.size(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    Link* on_trial = find_on_trial(call.layer->holders[s], links);
    Link& link = on_trial != nullptr ? *on_trial : *pick_holder(call.layer->holders[s], links);
    call.work->holders[s] = link.index;
    auto num_splits = cut_chunk(call, s, link);
    if (!num_splits.ok()) {
      call.work->slices.clear();
      call.work->forecasts.clear();
      return std::move(num_splits)
          .error()
          .with("worker " + link.name)
          .at({link.name, plan.layer, {}, {}});
    }
    if (num_splits.value() > 0) link.counters[plan.layer].splits += num_splits.value();
  }
  call.work->slices_left = call.work->slices.size();
  return ok();
}

// Asks the worker's model for the number of slices, or, under a fixed policy, only for the time
// that they should take.
Result<uint64_t> Cutter::cut_chunk(Call& call, uint32_t shard_index, Link& link) {
  const LayerPlan& plan = call.layer->plan;
  const ShardPlace& shard = plan.shards[shard_index];
  const ShardRows& rows = call.work->shard_rows[shard_index];
  const SlicePolicy& policy = link.policy;
  Chunk chunk;
  chunk.num_tokens = call.work->batch.num_tokens;
  chunk.least_slices = num_slices(chunk.num_tokens, policy.slice_tokens);
  chunk.rows = static_cast<double>(rows.tokens.size());
  chunk.pairs = static_cast<double>(rows.local_expert_ids.size());
  chunk.experts = count_experts(rows.local_expert_ids, shard.experts.size());
  chunk.request_bytes =
      chunk.rows * static_cast<double>(plan.in_size * dtype_bytes(link.request_dtype));
  chunk.reply_bytes =
      chunk.rows * static_cast<double>(plan.out_size * dtype_bytes(link.reply_dtype));
  const SliceChoice choice =
      link.model.choose(plan.cost_class, chunk, policy.window, !policy.is_measured);
  link.window = policy.is_measured ? choice.taken.window : policy.window;

  const uint32_t chosen_tokens =
      (chunk.num_tokens + choice.taken.num_slices - 1) / choice.taken.num_slices;
  const CutLimits limits{policy.is_measured ? chosen_tokens : policy.slice_tokens,
                         link.path.geometry(), link.request_dtype, link.reply_dtype};
  const size_t first = call.work->slices.size();
  auto num_splits = cut_shard(call, shard_index, link.index, limits);
  const std::span<Slice> cut = std::span(call.work->slices).subspan(first);
  const auto num_cut = static_cast<uint32_t>(cut.size());
  call.work->forecasts[shard_index] = {choice.taken, num_cut, link.index, false};
  for (Slice& slice : cut) {
    slice.forecast_ns = static_cast<int64_t>((choice.taken.ns - choice.taken.wait_ns) / num_cut);
    const auto ids = std::span(rows.local_expert_ids).subspan(slice.pair_begin, slice.num_pairs());
    slice.num_experts = num_cut == 1 ? static_cast<uint32_t>(chunk.experts)
                                     : count_experts(ids, shard.experts.size());
    link.cut_ns += slice.forecast_ns;
  }
  return num_splits;
}

uint32_t Cutter::count_experts(std::span<const uint16_t> local_expert_ids,
                               size_t num_local_experts) {
  if (expert_seen_.size() < num_local_experts) expert_seen_.resize(num_local_experts, 0);
  ++num_counts_;
  uint32_t count = 0;
  for (const uint16_t id : local_expert_ids) {
    count += expert_seen_[id] != num_counts_ ? 1 : 0;
    expert_seen_[id] = num_counts_;
  }
  return count;
}

}  // namespace dflash::client
