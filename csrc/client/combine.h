// The last step of a call. The replies of all shards are added per token in ascending shard id, in
// float32 from +0, and each sum is rounded once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/result.h"
#include "client/call.h"

namespace dflash::client {

// Keeps its scratch memory between calls. Not thread-safe.
class Combiner {
 public:
  // Writes the batch's output [num_tokens, out_size]; a token without an expert gets +0. All slices
  // must have arrived. Errors: kRange naming layer and token where a sum does not fit the output's
  // dtype.
  Status combine(const Call& call);

 private:
  // Where the next row of one shard is, in token order across its slices.
  struct Cursor {
    const ShardRows* rows;
    const Slice* slice;
    uint32_t row;
  };
  const std::byte* take(Cursor& cursor, uint32_t token, size_t out_size) const;
  void point_at_first_rows(const CallWork& work);

  std::vector<Cursor> cursors_;  // one for each shard with rows, in ascending shard id
  std::vector<float> sums_;      // [out_size], the sums of one token
};

}  // namespace dflash::client
