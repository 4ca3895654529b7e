// A submitted call and the slices it is cut into. Whoever has the turn (turn.h) owns all of it;
// only `is_done`, and `error` and `ended_ns` after it, are read by any thread.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "base/token_batch.h"
#include "client/buffer_pool.h"
#include "client/exchange.h"
#include "client/types.h"
#include "client/worker_model.h"

namespace dflash::client {

class Call;

// A layer in the form that calls need.
struct Layer {
  LayerPlan plan;  // its shards are in ascending id
  ExpertTable experts;
  // [num_shards], in the order of `plan.shards`: the workers that hold a shard, preferred first.
  std::vector<std::vector<uint32_t>> holders;
};

// A slice waits for a credit of the worker it was given to, is sent, and has arrived once its rows
// are in reply_rows. It is homeless when that worker was lost or refused it and no other holder has
// been found yet.
enum class SliceState : uint8_t { kWaiting, kInFlight, kArrived, kHomeless };

// What went wrong with a slice so far. Few slices have one.
struct SliceTroubles {
  std::vector<uint32_t> refused_by;  // workers that answered with an error; not asked again
  std::vector<std::string> told;     // what happened at each worker that was tried, in order
  std::optional<Error> last;
  // Since when it has waited for a holder, by the watch clock; 0 while it does not.
  int64_t parked_ns = 0;
  uint32_t worker = 0;  // the one that it was last taken from

  void add(Error error) {
    told.push_back(error.message);
    last = std::move(error);
  }
  // Says why a holder was not even asked, before what ended the last one that was.
  void pass_over(uint32_t holder, std::string why) {
    refused_by.push_back(holder);
    told.insert(told.empty() ? told.end() : told.end() - 1, std::move(why));
  }
  // What happened, without the `num_left_out` last ones, as one text.
  std::string all_told(size_t num_left_out = 0) const {
    std::string all;
    for (size_t i = 0; i + num_left_out < told.size(); ++i)
      all.append(all.empty() ? "" : "; ").append(told[i]);
    return all;
  }
  // The last trouble, and in its message those before it.
  Error error() const {
    Error all = last.value_or(Error{ErrorCode::kWorkerLost, "no holder can be asked"});
    if (told.size() > 1) all.message += "; before that: " + all_told(1);
    return all;
  }
};

// What travels in one request: rows [row_begin, row_end) of one shard's list, and their pairs.
struct Slice {
  Call* call = nullptr;
  uint32_t shard_index = 0;  // position in the layer's plan
  uint32_t worker = 0;       // the holder that it was given to
  // The slice's number within (call, shard), by which no two requests share an identity but for
  // their attempt.
  uint16_t index = 0;
  uint16_t num_attempts = 0;  // requests sent for it so far; the next one's number
  uint8_t num_in_flight = 0;  // of these requests; two while it is hedged
  bool is_hedged = false;     // whether a second request is under way, or was answered
  SliceState state = SliceState::kWaiting;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  uint32_t row_begin = 0, row_end = 0;
  uint32_t pair_begin = 0, pair_end = 0;
  uint32_t num_experts = 0;  // distinct experts that it asks for
  int64_t forecast_ns = 0;   // its share of the time predicted for its chunk
  Buffer reply_rows;         // [row_end - row_begin, out_size] in reply_dtype, once arrived
  ReplyTimes times;          // of the attempt that was answered first
  std::unique_ptr<SliceTroubles> troubles;  // null while all went well

  uint32_t num_rows() const { return row_end - row_begin; }
  uint32_t num_pairs() const { return pair_end - pair_begin; }
  SliceTroubles& trouble() {
    if (troubles == nullptr) troubles = std::make_unique<SliceTroubles>();
    return *troubles;
  }
  // The workers that are not asked for it again.
  std::span<const uint32_t> refused_by() const {
    return troubles == nullptr ? std::span<const uint32_t>() : troubles->refused_by;
  }
  std::span<const uint32_t> holders() const;
};

// One request on its way: a slice that was sent to one holder.
struct Attempt {
  Slice* slice = nullptr;
  uint16_t number = 0;      // which request of the slice; it travels with request and reply
  bool is_hedge = false;    // whether it was sent beside another one
  bool found_idle = false;  // whether the worker owed nothing when it was sent
  int64_t encode_start_ns = 0, published_ns = 0;
  int64_t asked_ns = 0;  // when it was published, by the watch clock
  // An answer that takes longer is late enough to ask another holder; 0 where nothing is predicted.
  int64_t patience_ns = 0;
  int64_t limit_ns = 0;  // a worker that answers nothing for longer is suspected
  uint64_t request_bytes = 0;

  // Whether it is unanswered for so long that another holder may be asked as well.
  bool is_late(int64_t now) const { return patience_ns > 0 && now - asked_ns >= patience_ns; }
};

// A chunk is the rows of a call at one shard; this is how its worker was predicted to take it.
struct ChunkForecast {
  SliceForecast predicted;
  uint32_t slices_left = 0;
  uint32_t worker = 0;    // for whom the chunk was cut
  bool is_alone = false;  // whether the chunk had that worker to itself, from beginning to end
};

// The bulk of a call. It is given back when the call is done, so that the next call finds its
// memory allocated.
struct CallWork {
  TokenBatch batch;                   // topk_ids and topk_weights are not read after submit()
  std::vector<ShardRows> shard_rows;  // [num_shards]
  std::vector<uint32_t> holders;      // [num_shards] once it is admitted: for whom it is cut
  std::vector<Slice> slices;          // by shard, then by row; never resized once the call is cut
  size_t slices_left = 0;             // that have not arrived
  std::vector<ChunkForecast> forecasts;  // [num_shards] once the call is cut, empty before
};

class Call {
 public:
  uint64_t id = 0;
  const Layer* layer = nullptr;
  int64_t submitted_ns = 0;
  int64_t ended_ns = 0;  // set before `is_done` publishes it, as `done_ns` is
  // By the watch clock (liveness.h): when it was submitted, when it is late, when it ended.
  int64_t asked_ns = 0, deadline_ns = 0, done_ns = 0;
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

inline std::span<const uint32_t> Slice::holders() const {
  return call->layer->holders[shard_index];
}

}  // namespace dflash::client
