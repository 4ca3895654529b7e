// The last step of a call: replies of all shards added per token in ascending shard id, in float32 from +0, rounded once.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/result.h"
#include "client/call.h"

namespace dflash::client {

// Writes call.batch.output [num_tokens, out_size]; a token without an expert gets +0. All parts must have arrived.
// Errors: kRange naming layer and token when a sum does not fit the output dtype.
Status combine(const Call& call);

}  // namespace dflash::client
