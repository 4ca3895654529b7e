// A submitted call and its parts. Everything here is guarded by the client's lock.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "client/exchange.h"
#include "client/expert_client.h"

namespace dflash::client {

// What submit() and completion need of a layer.
struct Layer {
  LayerPlan plan;      // shards in ascending id
  ExpertTable experts;
};

enum class PartState : uint8_t { kWaiting, kInFlight, kArrived };

// One request: rows [row_begin, row_end) of one shard's list.
struct Part {
  Call* call = nullptr;
  uint32_t shard_index = 0;  // position in the layer's plan
  uint32_t worker = 0;
  uint16_t slice = 0;
  uint32_t row_begin = 0, row_end = 0;
  uint32_t pair_begin = 0, pair_end = 0;
  PartState state = PartState::kWaiting;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  std::vector<std::byte> reply_rows;  // [row_end - row_begin, out_size] in reply_dtype, once arrived
  SliceTrace trace{};

  uint32_t num_rows() const { return row_end - row_begin; }
  uint32_t num_pairs() const { return pair_end - pair_begin; }
};

class Call {
 public:
  uint64_t id = 0;
  const Layer* layer = nullptr;
  TokenBatch batch;
  std::vector<ShardRows> shard_rows;  // [num_shards]
  std::vector<std::unique_ptr<Part>> parts;  // by shard, then by row; stable addresses
  size_t parts_left = 0;
  int64_t deadline_ns = 0;
  bool is_done = false;
  std::optional<Error> error;
};

}  // namespace dflash::client
