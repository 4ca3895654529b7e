// Experts whose arithmetic is a few lines, as a worker computes them and as the checker computes
// the whole call anew. Expert e maps a value v to v * scale(e) + shift(e) in float32; what matters
// of the product's own rules is the order of sums: experts ascending within a shard, shards
// ascending, in float32 (docs/numerics.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "store/compute_turns.h"
#include "store/resident_shard.h"

namespace dflash::simulation {

inline constexpr uint32_t kRowWidth = 8;  // of rows, in and out

// How a worker's experts behave; it belongs to the simulated process and changes under way.
struct ExpertsState {
  int64_t ns_per_pair = 20'000;  // what computing takes, in virtual time
  double slowdown = 1;
  int64_t longest_ns = 0;             // that a computation has taken so far
  std::optional<Error> next_refusal;  // the next request is answered so
  // Called when a computation begins, with its number of rows and the experts of its shard. The
  // session that has the turn is the one whose task runs.
  std::function<void(uint32_t, size_t)> on_compute = [](uint32_t, size_t) {};
  // All shards of the process have their turns in common, as those of one store do.
  std::shared_ptr<store::ComputeTurns> turns = std::make_shared<store::ComputeTurns>();
};

// The shard of these experts, global ids in ascending order. `state` must outlive it.
std::shared_ptr<store::ResidentShard> make_shard(const std::vector<uint32_t>& experts,
                                                 uint64_t fingerprint, ExpertsState& state);

// One call as the model makes it, and what it must give.
struct Rows {
  uint32_t num_tokens = 0, top_k = 0;
  std::vector<float> hidden_states;  // [num_tokens, kRowWidth]
  std::vector<int32_t> topk_ids;     // [num_tokens, top_k]
  std::vector<float> topk_weights;   // [num_tokens, top_k]
};
// Returns [num_tokens, kRowWidth]. `shards[s]` lists the experts of shard s in ascending order.
std::vector<float> expected_output(const Rows& rows,
                                   const std::vector<std::vector<uint32_t>>& shards);

}  // namespace dflash::simulation
