// Copying takes microseconds: a batch is as large as gives each expert of its shard a few rows.
// SPDX-License-Identifier: Apache-2.0
#include "worker/merged_batch.h"

#include <cstring>

#include "base/dtype.h"

namespace dflash::worker {

compute::ForwardArgs MergedBatch::gather(const compute::ForwardArgs& own,
                                         std::span<const store::ComputeTurns::Piece* const> others,
                                         size_t in_size, size_t out_size) {
  pieces_.assign(1, &own);
  for (const store::ComputeTurns::Piece* other : others) pieces_.push_back(&other->args);
  const size_t row_bytes = in_size * dtype_bytes(own.row_dtype);
  reply_row_bytes_ = out_size * dtype_bytes(own.reply_dtype);
  rows_.clear();
  row_counts_.clear();
  local_expert_ids_.clear();
  weights_.clear();
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  for (const compute::ForwardArgs* piece : pieces_) {
    append(rows_, std::span(piece->rows, piece->num_rows * row_bytes));
    append(row_counts_, piece->row_counts);
    append(local_expert_ids_, piece->local_expert_ids);
    append(weights_, piece->weights);
  }
  compute::ForwardArgs merged = own;
  merged.num_rows = static_cast<uint32_t>(row_counts_.size());
  if (reply_.size() < merged.num_rows * reply_row_bytes_)
    reply_.resize(merged.num_rows * reply_row_bytes_);
  merged.rows = rows_.data();
  merged.row_counts = row_counts_;
  merged.local_expert_ids = local_expert_ids_;
  merged.weights = weights_;
  merged.reply = reply_.data();
  return merged;
}

void MergedBatch::scatter() const {
  const std::byte* from = reply_.data();
  for (const compute::ForwardArgs* piece : pieces_) {
    const size_t bytes = piece->num_rows * reply_row_bytes_;
    std::memcpy(piece->reply, from, bytes);
    from += bytes;
  }
}

}  // namespace dflash::worker
