// Plans how calls are cut and how large the slots of data paths are, from a mode and the layers of
// the workers. Pure functions; cut.h then cuts within what was planned here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "client/types.h"

namespace dflash::client {

// Bytes of the slots of all workers together, where nobody asks for more.
inline constexpr uint64_t kDefaultArenaBytes = uint64_t{256} << 20;
// A slot beyond the window leaves room for another caller's slice, or for one quarantined slot
// before the path is worn.
inline constexpr uint32_t kSpareSlots = 1;

// What one shard of one layer demands of its holder's slots.
struct ShardShape {
  uint32_t in_size = 0, out_size = 0;
  uint32_t top_k = 0;
  uint32_t num_experts = 0;  // experts of the shard
};

enum class Mode : uint8_t { kAuto, kBatched, kStream };
const char* mode_name(Mode mode);
// Errors: kInvalidArgument naming the modes that exist.
Result<Mode> parse_mode(const std::string& name);

// A resolved mode: tokens per slice, slices in flight, and the rows that a slot must hold.
struct SlicePlan {
  Mode mode = Mode::kAuto;
  uint32_t slice_tokens = 0;
  uint32_t window = 0;
  uint32_t slot_rows = 0;

  // Whether both are upper bounds, within which every worker's model chooses.
  bool is_measured() const { return mode == Mode::kAuto; }
};

// The settings from which modes are resolved, in tokens.
struct ModeSettings {
  uint32_t batch_capacity = 0;
  uint32_t stream_tokens = 0, stream_tokens_max = 0;
};
// Errors: kInvalidArgument where the slice of mode stream exceeds its maximum.
Result<SlicePlan> plan_slices(Mode mode, const ModeSettings& settings);

// The slots of one worker's data path, and for how many rows they were made.
struct SlotPlan {
  uint32_t num_slots = 0;
  uint32_t rows = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;

  uint64_t arena_bytes() const { return num_slots * (request_bytes + reply_bytes); }
  // Whether a path with these slots serves what `other` was planned for.
  bool holds(const SlotPlan& other) const {
    return num_slots >= other.num_slots && request_bytes >= other.request_bytes &&
           reply_bytes >= other.reply_bytes;
  }
  transport::SlotGeometry geometry() const { return {num_slots, request_bytes, reply_bytes}; }
};

// Plans the slots of one worker for messages of `rows` rows, large enough for each of its layers.
// Errors: kInvalidArgument over a limit.
Result<SlotPlan> plan_slots(std::span<const ShardShape> shards, uint32_t rows, uint32_t num_slots,
                            Dtype request_dtype, Dtype reply_dtype);

// Plans the slots of every worker, in their order, which together stay within
// max(kDefaultArenaBytes, `shared_bytes`). Where that is too little for full slices, all workers
// get fewer rows per slot; the client then cuts smaller slices and counts them. Errors:
// kInvalidArgument where not even one row fits.
Result<std::vector<SlotPlan>> plan_arena(std::span<const std::vector<ShardShape>> workers,
                                         const SlicePlan& slices, Dtype request_dtype,
                                         Dtype reply_dtype, uint64_t shared_bytes = 0);

}  // namespace dflash::client
