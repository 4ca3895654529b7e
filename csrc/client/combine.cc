// Combining walks over all shards at once, token by token: each shard's rows are in ascending token
// order, so that one cursor per shard suffices.
// SPDX-License-Identifier: Apache-2.0
#include "client/combine.h"

#include <algorithm>

#include "base/convert.h"
#include "base/float_mode.h"

namespace dflash::client {

void Combiner::point_at_first_rows(const CallWork& work) {
  cursors_.clear();
  for (const Slice& slice : work.slices) {
    if (slice.row_begin == 0) cursors_.push_back({&work.shard_rows[slice.shard_index], &slice, 0});
  }
}

// Returns the reply row of `token`, or null where the shard has none. Tokens must be asked for in
// ascending order.
const std::byte* Combiner::take(Cursor& cursor, uint32_t token, size_t out_size) const {
  if (cursor.row == cursor.rows->tokens.size() || cursor.rows->tokens[cursor.row] != token)
    return nullptr;
  if (cursor.row == cursor.slice->row_end) ++cursor.slice;  // slices of a shard lie side by side
  const size_t row = cursor.row++ - cursor.slice->row_begin;
  return cursor.slice->reply_rows.bytes.get() +
         row * out_size * dtype_bytes(cursor.slice->reply_dtype);
}

Status Combiner::combine(const Call& call) {
  // Whoever drives adds up other threads' calls too, in whatever mode its own thread is.
  const CanonicalFloatMode mode;
  const size_t out_size = call.layer->plan.out_size;
  const TokenBatch& batch = call.work->batch;
  point_at_first_rows(*call.work);
  sums_.resize(out_size);
  for (uint32_t token = 0; token < batch.num_tokens; ++token) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    for (Cursor& cursor : cursors_) {
      const std::byte* row = take(cursor, token, out_size);
      if (row != nullptr) widen_add(cursor.slice->reply_dtype, row, sums_.data(), out_size);
    }
    std::byte* out = batch.output + token * out_size * dtype_bytes(batch.dtype);
    if (!convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums_.data()), batch.dtype, out,
                 out_size)) {
      return Error{ErrorCode::kRange,
                   "layer " + call.layer->plan.name + ", token " + std::to_string(token) +
                       ": the sum of its experts does not fit " + dtype_name(batch.dtype) +
                       "; run the model in bf16 or f32"}
          .at({{}, call.layer->plan.layer, token, {}});
    }
  }
  return ok();
}

}  // namespace dflash::client
