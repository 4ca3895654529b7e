// Calls with drawn batches, and what their outputs must be.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "base/token_batch.h"

namespace dflash::failover {

inline constexpr std::array<uint32_t, 4> kSizes = {1, 4, 64, 256};  // tokens of a call
inline constexpr uint32_t kMostCalls = 3;                           // under way at a time
inline constexpr uint32_t kBatchesPerSize = 3;
// A shape says what takes equally long: tokens, and the call's place in its round, where one that
// is alone has a place of its own.
inline constexpr uint32_t kNumShapes = kSizes.size() * (1 + kMostCalls);
inline uint32_t shape_of(uint32_t size, uint32_t num_calls, uint32_t place) {
  return size * (1 + kMostCalls) + (num_calls == 1 ? 0 : 1 + place);
}

// Inputs of a call, and the output of a run without faults.
struct Batch {
  Batch(std::mt19937_64& random, uint32_t num_tokens, uint32_t num_experts, uint32_t num_shards);
  // A view with another place for the output, which has as many floats as `expected`.
  TokenBatch into(std::vector<float>& output) const;

  uint32_t num_tokens;
  std::vector<float> hidden;  // [num_tokens, kWidth]
  std::vector<int32_t> ids;   // [num_tokens, kTopK]; token 0 has an expert of every shard
  std::vector<float> weights;
  std::vector<float> expected;  // [num_tokens, kWidth]; empty before the run without faults
};

}  // namespace dflash::failover
