// Pieces of several sessions' requests as one batch: their rows one after the other, and the rows
// of the reply back to each. A row's bits do not depend on the rows beside it, so that everybody
// gets what it would have got alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
#include "store/compute_turns.h"

namespace dflash::worker {

// Keeps its memory from batch to batch. Of one thread.
class MergedBatch {
 public:
  // Copies `own` and `others`, pieces for a shard with rows of these widths, and returns them as
  // one batch, whose reply is scattered by scatter(). It is valid until the next gather().
  compute::ForwardArgs gather(const compute::ForwardArgs& own,
                              std::span<const store::ComputeTurns::Piece* const> others,
                              size_t in_size, size_t out_size);
  // Copies each piece's rows of the reply to where that one has asked for them.
  void scatter() const;

 private:
  std::vector<const compute::ForwardArgs*> pieces_;
  size_t reply_row_bytes_ = 0;
  std::vector<std::byte> rows_, reply_;
  std::vector<uint16_t> row_counts_, local_expert_ids_;
  std::vector<float> weights_;
};

}  // namespace dflash::worker
