// The client's view of one worker: its data path, whether it is alive, what waits to be sent there,
// what was learned of its speed, and what was counted. Whoever has the turn (turn.h) uses it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>

#include "client/call.h"
#include "client/liveness.h"
#include "client/path.h"
#include "client/types.h"
#include "client/worker_model.h"

namespace dflash::client {

// Slices that wait for a credit, first come first served.
class WaitingSlices {
 public:
  bool empty() const { return slices_.empty(); }
  // The predicted time of all of them together: for how long the worker still has work.
  int64_t forecast_ns() const { return forecast_ns_; }
  Slice& front() { return *slices_.front(); }
  void push(Slice& slice) {
    slices_.push_back(&slice);
    forecast_ns_ += slice.forecast_ns;
  }
  void pop() {
    forecast_ns_ -= slices_.front()->forecast_ns;
    slices_.pop_front();
  }
  void drop(const Call& call) {
    std::erase_if(slices_, [&](const Slice* slice) {
      if (slice->call != &call) return false;
      forecast_ns_ -= slice->forecast_ns;
      return true;
    });
  }
  void clear() {
    slices_.clear();
    forecast_ns_ = 0;
  }

 private:
  std::deque<Slice*> slices_;
  int64_t forecast_ns_ = 0;
};

struct Link {
  explicit Link(NewWorker worker)
      : name(std::move(worker.name)),
        path(std::move(worker.path)),
        liveness(std::move(worker.pulse)),
        policy(worker.policy),
        request_dtype(worker.request_dtype),
        reply_dtype(worker.reply_dtype),
        window(worker.policy.window) {}

  // Whether the worker is expected to make progress, so that standing still counts against it.
  bool owes() const { return path.owes() || path.state() == PathState::kLeased; }
  Error lost_error(const Layer& layer) const;

  const std::string name;
  Path path;
  Liveness liveness;
  SlicePolicy policy;
  Dtype request_dtype, reply_dtype;  // of calls that are cut from now on

  WaitingSlices waiting;
  // The most slices in flight: the policy's number, or what the model chose for the newest chunk.
  uint32_t window = 0;

  WorkerModel model;
  uint32_t num_chunks = 0;  // chunks under way at the worker
  int64_t crowded_ns = 0;   // when a chunk last came while another was under way

  std::map<uint32_t, Counters> counters;  // by layer
  uint32_t last_layer = 0;                // layer of the slice sent last; waiting is booked on it
  uint64_t stale_replies = 0;             // replies that came after their call had ended
};

// Makes an error such as "worker w1 was lost: hung up (layer model.layers.3.mlp.experts)".
inline Error Link::lost_error(const Layer& layer) const {
  return Error{ErrorCode::kWorkerLost, "worker " + name + " was lost: " + path.reason() +
                                           " (layer " + layer.plan.name + ")"}
      .at({name, layer.plan.layer, {}, {}});
}

}  // namespace dflash::client
