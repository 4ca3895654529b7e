// The client's view of one worker: its data path, whether it is alive, what waits to be sent there,
// what was learned of its speed, and what was counted. Whoever has the turn (turn.h) uses it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "client/call.h"
#include "client/liveness.h"
#include "client/path.h"
#include "client/silence.h"
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
  // A slice that was under way before comes first: its call waits longest.
  void push_front(Slice& slice) {
    slices_.push_front(&slice);
    forecast_ns_ += slice.forecast_ns;
  }
  // Takes out the slices for which `must_go(slice)` holds.
  template <class Condition>
  void take_out(Condition must_go) {
    std::erase_if(slices_, [&](Slice* slice) {
      if (!must_go(*slice)) return false;
      forecast_ns_ -= slice->forecast_ns;
      return true;
    });
  }
  void drop(const Call& call) {
    take_out([&call](const Slice& slice) { return slice.call == &call; });
  }
  const std::deque<Slice*>& slices() const { return slices_; }

 private:
  std::deque<Slice*> slices_;
  int64_t forecast_ns_ = 0;
};

struct Link {
  Link(NewWorker worker, uint32_t worker_index)
      : name(std::move(worker.name)),
        index(worker_index),
        is_last_resort(worker.is_last_resort),
        path(std::move(worker.path)),
        liveness(std::move(worker.pulse)),
        policy(worker.policy),
        request_dtype(worker.request_dtype),
        reply_dtype(worker.reply_dtype),
        window(worker.policy.window) {}

  // Whether the worker is expected to make progress, so that standing still counts against it.
  bool owes() const { return path.owes() || path.state() == PathState::kLeased; }
  // Whether slices can be sent on its path now.
  bool is_usable() const {
    return path.state() == PathState::kFresh || path.state() == PathState::kInUse;
  }
  // The time predicted for all that it has and all that waits for it.
  int64_t backlog_ns() const { return waiting.forecast_ns() + path.forecast_ns() + cut_ns; }
  // Whether it owes an answer and has given none for too long.
  bool answers_nothing() const { return silence.is_suspect() && path.is_listening(); }
  // Whether it owes nothing any more, but has to answer something before it is trusted again.
  bool is_on_trial() const {
    return silence.is_suspect() && !path.is_listening() && waiting.empty() && is_usable();
  }
  // Whether what it owes is asked of others without waiting any longer.
  bool is_suspect() const { return is_stalled || answers_nothing(); }
  // Why it is lost, worn or suspected; empty otherwise.
  std::string reason() const;
  Error lost_error(const Layer& layer) const;

  const std::string name;
  const uint32_t index;  // by which holders name it
  const bool is_last_resort;
  Admission admission = Admission::kOpen;
  // Whether somebody brings the worker back if it is lost, so that it is worth waiting for.
  bool has_remedy = false;
  bool may_have_stand_in = false;  // whether another holder is named once it is suspected
  int64_t lost_ns = 0;             // when it was lost last, by the watch clock
  // Whether it owes replies and shows no progress, since its progress counter was `stalled_at`.
  bool is_stalled = false;
  uint64_t stalled_at = 0;
  // Whether it has owed an answer for longer than was predicted. Only judged where shards have
  // several holders.
  bool is_late = false;
  Path path;
  Liveness liveness;
  Silence silence;
  SlicePolicy policy;
  Dtype request_dtype, reply_dtype;  // of calls that are cut from now on

  WaitingSlices waiting;
  // The same for what it gets of the call that is being cut, so that the shards of one call are
  // spread as those of several are; 0 between calls.
  int64_t cut_ns = 0;
  // The most slices in flight: the policy's number, or what the model chose for the newest chunk.
  uint32_t window = 0;

  WorkerModel model;
  uint32_t num_chunks = 0;  // chunks under way at the worker
  int64_t crowded_ns = 0;   // when a chunk last came while another was under way

  std::map<uint32_t, Counters> counters;  // by layer
  uint32_t last_layer = 0;                // layer of the slice sent last; waiting is booked on it
  uint64_t stale_replies = 0;             // replies that came after their call had ended
};

// The workers of a client, by index.
using Links = std::span<const std::unique_ptr<Link>>;

inline std::string Link::reason() const {
  if (std::string of_path = path.reason(); !of_path.empty()) return of_path;
  return is_stalled ? "shows no progress" : answers_nothing() ? "answers nothing" : "";
}

// Makes an error such as "worker w1 was lost: hung up (layer model.layers.3.mlp.experts)".
inline Error Link::lost_error(const Layer& layer) const {
  return Error{ErrorCode::kWorkerLost, "worker " + name + " was lost: " + path.reason() +
                                           " (layer " + layer.plan.name + ")"}
      .at({name, layer.plan.layer, {}, {}});
}

}  // namespace dflash::client
