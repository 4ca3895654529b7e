// Cuts calls into slices. They are cut evenly by tokens, into as many as the mode says or as a
// worker's model predicts to be best, and further where a slot is too small.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/result.h"
#include "client/call.h"
#include "client/link.h"

namespace dflash::client {

// Bytes of the request and of the reply for `num_rows` rows and `num_pairs` pairs, header included;
// 0 where a limit of the protocol is exceeded.
uint64_t request_message_bytes(const LayerPlan& plan, uint32_t num_rows, uint32_t num_pairs,
                               Dtype dtype);
uint64_t reply_message_bytes(const LayerPlan& plan, uint32_t num_rows, Dtype dtype);
// Whether both messages of a slice are allowed and fit a slot.
bool fits(const Slice& slice, const transport::SlotGeometry& slot);

// The limits for the slices of one shard. The dtypes are those of its messages.
struct CutLimits {
  uint32_t slice_tokens = 1;
  transport::SlotGeometry slot;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
};

// Appends the slices of shard `shard_index` to call.work->slices; a token range without rows gives
// none. Returns how many slices there are beyond one for each range with rows. Errors:
// kInvalidArgument where a single row does not fit a slot, or where there are too many slices.
Result<uint64_t> cut_shard(Call& call, uint32_t shard_index, uint32_t worker,
                           const CutLimits& limits);

// Keeps its scratch memory between calls. Not thread-safe.
class Cutter {
 public:
  // Picks the holder of each shard that the call has rows for, which must have a usable one
  // (router.h), fills the call's holders, slices and forecasts, and chooses each picked link's
  // window. Errors are those of cut_shard, naming worker and layer; nothing is cut then.
  Status cut(Call& call, Links links);

 private:
  Status cut_all(Call& call, Links links);
  Result<uint64_t> cut_chunk(Call& call, uint32_t shard_index, Link& link);
  uint32_t count_experts(std::span<const uint16_t> local_expert_ids, size_t num_local_experts);

  std::vector<uint64_t> expert_seen_;  // by local id: the count in which the expert was last seen
  uint64_t num_counts_ = 0;
};

}  // namespace dflash::client
