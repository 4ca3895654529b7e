// SPDX-License-Identifier: Apache-2.0
#include "failover/rounds.h"

#include <algorithm>
#include <limits>

#include "failover/worker_process.h"

namespace dflash::failover {
namespace {

constexpr uint32_t kTopK = 4;

}  // namespace

Batch::Batch(std::mt19937_64& random, uint32_t tokens, uint32_t num_experts, uint32_t num_shards)
    : num_tokens(tokens) {
  for (size_t i = 0; i < size_t{tokens} * kWidth; ++i)
    hidden.push_back(static_cast<float>(random() % 2001) / 1000.0f - 1.0f);
  std::vector<int32_t> all(num_experts);
  for (uint32_t i = 0; i < num_experts; ++i) all[i] = static_cast<int32_t>(i);
  for (uint32_t token = 0; token < tokens; ++token) {
    for (uint32_t k = 0; k < kTopK; ++k) std::swap(all[k], all[k + random() % (num_experts - k)]);
    ids.insert(ids.end(), all.begin(), all.begin() + kTopK);
    for (uint32_t k = 0; k < kTopK; ++k)
      weights.push_back(static_cast<float>(random() % 1000 + 1) / 2000.0f);
  }
  // So that every call needs every worker.
  for (uint32_t k = 0; k < std::min(kTopK, num_shards); ++k)
    ids[k] = static_cast<int32_t>(k * kExpertsEach + random() % kExpertsEach);
  for (uint32_t k = num_shards; k < kTopK; ++k)
    ids[k] = static_cast<int32_t>(num_experts);  // the sentinel asks for nothing
}

TokenBatch Batch::into(std::vector<float>& output) const {
  output.assign(hidden.size(), std::numeric_limits<float>::quiet_NaN());
  TokenBatch batch;
  batch.hidden_states = reinterpret_cast<const std::byte*>(hidden.data());
  batch.row_stride_bytes = kWidth * sizeof(float);
  batch.num_tokens = num_tokens;
  batch.top_k = kTopK;
  batch.topk_ids = ids.data();
  batch.topk_weights = reinterpret_cast<const std::byte*>(weights.data());
  batch.output = reinterpret_cast<std::byte*>(output.data());
  return batch;
}

}  // namespace dflash::failover
