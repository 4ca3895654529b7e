// SPDX-License-Identifier: Apache-2.0
#include "worker/pieces.h"

#include <algorithm>
#include <span>

namespace dflash::worker {
namespace {

// Longer than a step of a host that decodes takes, the part in which it needs no experts included:
// such a host leaves pauses in which nobody seems to wait.
constexpr int64_t kGrowthNs = 1'000'000'000;

}  // namespace

Piece PieceCutter::next(const wire::RaggedIndex& index, const Piece& former, size_t num_experts,
                        int64_t quiet_ns) {
  Piece piece{former.first_row + former.num_rows, 0, former.first_pair + former.num_pairs, 0};
  const std::span<const uint16_t> counts = index.row_counts().subspan(piece.first_row);
  const std::span<const uint16_t> ids = index.local_expert_ids().subspan(piece.first_pair);
  const auto num_left = static_cast<uint32_t>(counts.size());
  const auto take = [&](uint32_t num_rows) {
    for (; piece.num_rows < num_rows; ++piece.num_rows) piece.num_pairs += counts[piece.num_rows];
  };
  const uint64_t most = kPairsPerExpert * (1 + static_cast<uint64_t>(quiet_ns / kGrowthNs));
  // A piece could have that many pairs of a single expert, and these are no more. Requests of a few
  // rows, and all of a session that is alone, end here without a look at their pairs.
  if (ids.size() <= most) {
    take(num_left);
    return piece;
  }
  is_touched_.assign(num_experts, false);
  uint32_t num_touched = 0, pair = 0;
  do {
    take(piece.num_rows + 1);
    for (; pair < piece.num_pairs; ++pair) {
      auto is_touched = is_touched_[ids[pair]];
      num_touched += is_touched ? 0 : 1;
      is_touched = true;
    }
  } while (piece.num_rows < num_left && piece.num_pairs < most * num_touched);
  take(num_left / std::max(1u, num_left / piece.num_rows));
  return piece;
}

}  // namespace dflash::worker
