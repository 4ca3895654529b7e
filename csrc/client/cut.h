// Cuts one shard's rows of a call into requests: evenly by tokens as the worker's policy says, and
// further where a slot is too small.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "client/call.h"
#include "transport/channel.h"

namespace dflash::client {

struct CutLimits {
  uint32_t slice_tokens = 1;
  transport::SlotGeometry slot;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
};

// Appends the parts of shard `shard_index` to call.work->parts; a token range without rows gives
// none. Returns how many parts there are beyond one for each range with rows. Errors:
// kInvalidArgument when a single row does not fit a slot, or on too many parts.
Result<uint64_t> cut_shard(Call& call, uint32_t shard_index, uint32_t worker,
                           const CutLimits& limits);

}  // namespace dflash::client
