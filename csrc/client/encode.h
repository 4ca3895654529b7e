// Turns a slice into a request. Header, index part and rows are written straight into the slot;
// rows are converted and checksummed in one pass.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "base/result.h"
#include "client/call.h"

namespace dflash::client {

// Bytes of the request and of the reply for `num_rows` rows and `num_pairs` pairs, header included;
// 0 where a limit of the protocol is exceeded.
uint64_t request_message_bytes(const LayerPlan& plan, uint32_t num_rows, uint32_t num_pairs,
                               Dtype dtype);
uint64_t reply_message_bytes(const LayerPlan& plan, uint32_t num_rows, Dtype dtype);

// Writes the whole request of `slice`, its `attempt`th, into `slot` and returns its length. Errors:
// kRange naming layer and token where a finite hidden state does not fit the wire dtype.
Result<size_t> encode_request(const Slice& slice, uint16_t attempt, uint64_t generation,
                              std::span<std::byte> slot);

}  // namespace dflash::client
