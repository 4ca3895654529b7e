// A submitted call and the slices it is cut into. Whoever has the turn (turn.h) owns all of it;
// only `is_done`, and `error` and `ended_ns` after it, are read by any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/result.h"
#include "base/token_batch.h"
#include "client/buffer_pool.h"
#include "client/exchange.h"
#include "client/slicing.h"
#include "client/types.h"

namespace dflash::client {

class Call;

// A layer in the form that calls need.
struct Layer {
  LayerPlan plan;  // its shards are in ascending id
  ExpertTable experts;
};

// A slice waits for a credit, is sent, and has arrived once its rows are in reply_rows.
enum class SliceState : uint8_t { kWaiting, kInFlight, kArrived };

// What travels in one request: rows [row_begin, row_end) of one shard's list, and their pairs.
struct Slice {
  Call* call = nullptr;
  uint32_t shard_index = 0;  // position in the layer's plan
  uint32_t worker = 0;
  // The slice's number within (call, shard), by which no two requests share an identity.
  uint16_t index = 0;
  SliceState state = SliceState::kWaiting;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  uint32_t row_begin = 0, row_end = 0;
  uint32_t pair_begin = 0, pair_end = 0;
  uint32_t num_experts = 0;    // distinct experts that it asks for
  int64_t forecast_ns = 0;     // its share of the time predicted for its chunk
  bool found_idle = false;     // whether its worker owed nothing when it was sent
  uint64_t request_bytes = 0;  // bytes of the message, known once it is sent
  Buffer reply_rows;           // [row_end - row_begin, out_size] in reply_dtype, once arrived
  SliceTrace trace{};

  uint32_t num_rows() const { return row_end - row_begin; }
  uint32_t num_pairs() const { return pair_end - pair_begin; }
};

// A chunk is the rows of a call at one shard; this is how its worker was predicted to take it.
struct ChunkForecast {
  SliceForecast predicted;
  uint32_t slices_left = 0;
  bool is_alone = false;  // whether no other call had anything at the worker when this one came
};

// The bulk of a call. It is given back when the call is done, so that the next call finds its
// memory allocated.
struct CallWork {
  TokenBatch batch;                   // topk_ids and topk_weights are not read after submit()
  std::vector<ShardRows> shard_rows;  // [num_shards]
  std::vector<Slice> slices;          // by shard, then by row; never resized once the call is cut
  size_t slices_left = 0;
  std::vector<ChunkForecast> forecasts;  // [num_shards] once the call is cut, empty before
};

class Call {
 public:
  uint64_t id = 0;
  const Layer* layer = nullptr;
  int64_t submitted_ns = 0, deadline_ns = 0;
  int64_t ended_ns = 0;  // set before `is_done` publishes it
  // When the client began to cut it: at submit, or when it was admitted after it had been parked.
  int64_t begun_ns = 0;
  // True while a data path that it needs is worn or leased, or the client is held: not cut yet.
  bool is_parked = false;
  std::unique_ptr<CallWork> work;  // null once the call is done
  std::optional<Error> error;
  // Stored with release after the output, `error` and `ended_ns` were written, which it publishes.
  std::atomic<bool> is_done = false;
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace dflash::client
