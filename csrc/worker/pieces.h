// How much of a request is computed in one turn, beside other sessions.
//
// All weights of an expert are read for each piece, so that a piece should give its experts many
// rows; and whoever asks next waits for the whole piece. So pieces are as small as kernels bear
// while sessions ask by turns, and grow by as much again with each second in which one has the
// worker to itself. The first call of a host after a silence thus waits for a small part of that
// silence at most, and a session that stays alone is soon not cut at all.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "wire/ragged.h"

namespace dflash::worker {

// With fewer rows for an expert, bf16 and int4 kernels were measured to lose up to half of their
// rate. What cutting still costs with as many becomes small as pieces grow.
inline constexpr uint32_t kPairsPerExpert = 8;

// Rows of a request that follow one another, with their pairs.
struct Piece {
  uint32_t first_row = 0, num_rows = 0, first_pair = 0, num_pairs = 0;
};

// Cuts the requests of one session. Of one thread.
class PieceCutter {
 public:
  // Returns the piece that follows `former` (at first an empty one) in a request with rows left:
  // the fewest rows that give each expert they touch kPairsPerExpert pairs, and as many again for
  // each second of `quiet_ns`, for which no two sessions have asked by turns. Pieces of a request
  // are as even as that allows. The shard has `num_experts`; ids in `index` are below that.
  Piece next(const wire::RaggedIndex& index, const Piece& former, size_t num_experts,
             int64_t quiet_ns);

 private:
  std::vector<bool> is_touched_;  // by expert
};

}  // namespace dflash::worker
