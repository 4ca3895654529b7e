// Plans slots. Where the arena is too small for full slices, the largest number of rows that fits
// is found by halving the interval.
// SPDX-License-Identifier: Apache-2.0
#include "client/slot_plan.h"

#include <algorithm>

#include "wire/limits.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr uint32_t kBatchedWindow = 2;  // one slice is computed while the next one travels
// The upper bound of mode auto: one slice on its way, one being computed, one coming back, and one
// for the latency between them.
constexpr uint32_t kAutoWindow = 4;
// The slices of mode stream are small, so that many must be in flight to cover a round trip of a
// worker that computes four rows at a time.
constexpr uint32_t kStreamWindow = 8;

constexpr Mode kModes[] = {Mode::kAuto, Mode::kBatched, Mode::kStream};

Error argument_error(std::string text) {
  return Error{ErrorCode::kInvalidArgument, std::move(text)};
}

uint64_t whole_lines(uint64_t num_bytes) { return (num_bytes + 63) / 64 * 64; }

using Plans = std::vector<SlotPlan>;

// Plans the slots of all workers for `rows` rows each.
Result<Plans> plan_rows(std::span<const std::vector<ShardShape>> workers, uint32_t rows,
                        uint32_t num_slots, Dtype request_dtype, Dtype reply_dtype) {
  Plans plans;
  for (const std::vector<ShardShape>& shards : workers) {
    auto planned = plan_slots(shards, rows, num_slots, request_dtype, reply_dtype);
    if (!planned.ok()) return std::move(planned).error();
    plans.push_back(planned.value());
  }
  return plans;
}

uint64_t arena_bytes(const Plans& plans) {
  uint64_t sum = 0;
  for (const SlotPlan& plan : plans) sum += plan.arena_bytes();
  return sum;
}

// Plans slots for `window` slices in flight, with as many rows each as the arena holds.
Result<Plans> plan_window(std::span<const std::vector<ShardShape>> workers, const SlicePlan& slices,
                          uint32_t window, Dtype request_dtype, Dtype reply_dtype, uint64_t limit) {
  const auto plan = [&](uint32_t rows) {
    return plan_rows(workers, rows, window + kSpareSlots, request_dtype, reply_dtype);
  };
  const auto fits = [limit](const Result<Plans>& plans) {
    return plans.ok() && arena_bytes(plans.value()) <= limit;
  };
  if (auto full = plan(slices.slot_rows); fits(full)) return full;
  const auto least = plan(1);
  if (!least.ok()) return least;
  if (!fits(least)) {
    return argument_error("shared_bytes: one row per slot for " + std::to_string(workers.size()) +
                          " workers needs " + std::to_string(arena_bytes(least.value())) +
                          " bytes, allowed are " + std::to_string(limit) +
                          "; raise ipc.shared_bytes");
  }
  uint32_t low = 1, high = slices.slot_rows;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (fits(plan(middle)) ? low : high) = middle;
  }
  return plan(low);
}

}  // namespace

const char* mode_name(Mode mode) {
  return mode == Mode::kAuto ? "auto" : mode == Mode::kBatched ? "batched" : "stream";
}

Result<Mode> parse_mode(const std::string& name) {
  for (const Mode mode : kModes) {
    if (name == mode_name(mode)) return mode;
  }
  return argument_error("mode '" + name + "' is not one of auto, batched, stream");
}

Result<SlicePlan> plan_slices(Mode mode, const ModeSettings& settings) {
  if (mode != Mode::kStream) {
    const uint32_t window = mode == Mode::kAuto ? kAutoWindow : kBatchedWindow;
    return SlicePlan{mode, settings.batch_capacity, window, settings.batch_capacity};
  }
  if (settings.stream_tokens < 1 || settings.stream_tokens > settings.stream_tokens_max) {
    return argument_error("stream_tokens " + std::to_string(settings.stream_tokens) +
                          " is outside 1.." + std::to_string(settings.stream_tokens_max) +
                          " (stream_tokens_max)");
  }
  return SlicePlan{mode, settings.stream_tokens, kStreamWindow, settings.stream_tokens_max};
}

Result<SlotPlan> plan_slots(std::span<const ShardShape> shards, uint32_t rows, uint32_t num_slots,
                            Dtype request_dtype, Dtype reply_dtype) {
  SlotPlan plan{num_slots, rows, 0, 0};
  for (const ShardShape& shard : shards) {
    const uint32_t pairs_per_row =
        std::max(1u, std::min({shard.top_k, shard.num_experts, wire::kMaxPairsPerRow}));
    const auto pairs =
        static_cast<uint32_t>(std::min<uint64_t>(wire::kMaxPairs, uint64_t{rows} * pairs_per_row));
    const auto request = wire::RequestLayout::of(rows, pairs, shard.in_size, request_dtype);
    if (!request.ok()) return request.error();
    const auto reply = wire::ReplyLayout::of(rows, shard.out_size, reply_dtype);
    if (!reply.ok()) return reply.error();
    plan.request_bytes = std::max(plan.request_bytes, request.value().payload_bytes);
    plan.reply_bytes = std::max(plan.reply_bytes, reply.value().payload_bytes);
  }
  // An error must fit wherever a reply does.
  plan.reply_bytes = std::max<uint64_t>(plan.reply_bytes, wire::kMaxErrorPayloadBytes);
  plan.request_bytes = whole_lines(wire::kFrameHeaderBytes + plan.request_bytes);
  plan.reply_bytes = whole_lines(wire::kFrameHeaderBytes + plan.reply_bytes);
  const uint64_t largest = std::max(plan.request_bytes, plan.reply_bytes);
  if (largest <= transport::kMaxSlotBytes) return plan;
  return argument_error("slots of " + std::to_string(rows) + " rows need " +
                        std::to_string(largest) + " bytes, allowed are " +
                        std::to_string(transport::kMaxSlotBytes) + "; lower batch_capacity");
}

Result<Plans> plan_arena(std::span<const std::vector<ShardShape>> workers, const SlicePlan& slices,
                         Dtype request_dtype, Dtype reply_dtype, uint64_t shared_bytes) {
  const uint64_t limit = std::max(kDefaultArenaBytes, shared_bytes);
  if (!slices.is_measured())
    return plan_window(workers, slices, slices.window, request_dtype, reply_dtype, limit);
  // Takes the widest window whose slots still hold full slices, otherwise the narrowest: whole
  // chunks matter more than wide windows.
  for (uint32_t window = slices.window;; --window) {
    auto plans = plan_window(workers, slices, window, request_dtype, reply_dtype, limit);
    const bool is_full =
        plans.ok() && std::all_of(plans.value().begin(), plans.value().end(),
                                  [&](const auto& one) { return one.rows == slices.slot_rows; });
    if (is_full || window <= kBatchedWindow) return plans;
  }
}

}  // namespace dflash::client
