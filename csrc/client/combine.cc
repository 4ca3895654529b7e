// SPDX-License-Identifier: Apache-2.0
#include "client/combine.h"

#include <algorithm>

#include "base/convert.h"

namespace dflash::client {
namespace {

// Walks the rows of one shard in token order, across its parts.
class ShardCursor {
 public:
  ShardCursor(const Call& call, size_t first_part, size_t end_part, const ShardRows& rows)
      : call_(call), part_(first_part), end_part_(end_part), rows_(rows) {}

  // The reply row of `token`, or null when the shard has none. Tokens must be asked in ascending order.
  const std::byte* take(uint32_t token, size_t out_size, Dtype& dtype) {
    if (row_ == rows_.tokens.size() || rows_.tokens[row_] != token) return nullptr;
    while (part_ < end_part_ && call_.parts[part_]->row_end <= row_) ++part_;
    const Part& part = *call_.parts[part_];
    dtype = part.reply_dtype;
    return part.reply_rows.data() + (row_++ - part.row_begin) * out_size * dtype_bytes(dtype);
  }

 private:
  const Call& call_;
  size_t part_, end_part_;
  const ShardRows& rows_;
  size_t row_ = 0;
};

std::vector<ShardCursor> cursors_of(const Call& call) {
  std::vector<ShardCursor> cursors;
  cursors.reserve(call.shard_rows.size());
  size_t part = 0;
  for (size_t s = 0; s < call.shard_rows.size(); ++s) {
    size_t end = part;
    while (end < call.parts.size() && call.parts[end]->shard_index == s) ++end;
    cursors.emplace_back(call, part, end, call.shard_rows[s]);
    part = end;
  }
  return cursors;
}

}  // namespace

Status combine(const Call& call) {
  const size_t out_size = call.layer->plan.out_size;
  const Dtype out_dtype = call.batch.dtype;
  std::vector<ShardCursor> cursors = cursors_of(call);
  std::vector<float> sums(out_size);
  for (uint32_t token = 0; token < call.batch.num_tokens; ++token) {
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (ShardCursor& cursor : cursors) {
      Dtype dtype = Dtype::kF32;
      if (const std::byte* row = cursor.take(token, out_size, dtype)) widen_add(dtype, row, sums.data(), out_size);
    }
    std::byte* out = call.batch.output + token * out_size * dtype_bytes(out_dtype);
    if (!convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums.data()), out_dtype, out, out_size)) {
      return Error{ErrorCode::kRange, "layer " + call.layer->plan.name + ", token " + std::to_string(token) +
                                          ": the sum of its experts does not fit " + dtype_name(out_dtype) +
                                          "; run the model in bf16 or f32"};
    }
  }
  return ok();
}

}  // namespace dflash::client
