// The last step of a call: replies of all shards added per token in ascending shard id, in float32
// from +0, rounded once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "base/result.h"
#include "client/call.h"

namespace dflash::client {

// Keeps its scratch memory between calls.
class Combiner {
 public:
  // Writes the batch's output [num_tokens, out_size]; a token without an expert gets +0. All parts
  // must have arrived. Errors: kRange naming layer and token when a sum does not fit the output
  // dtype.
  Status combine(const Call& call);

 private:
  // Where one shard's next row is, in token order across its slices.
  struct Cursor {
    const ShardRows* rows;
    const Slice* slice;
    uint32_t row;
  };
  const std::byte* take(Cursor& cursor, uint32_t token, size_t out_size) const;
  void point_at_first_rows(const CallWork& work);

  std::vector<Cursor> cursors_;  // [shards with rows], ascending shard id
  std::vector<float> sums_;      // [out_size]
};

}  // namespace dflash::client
