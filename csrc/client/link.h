// The client's view of one worker: its data path, how it stands, what waits to be sent there, what
// was learned of its speed, and what was counted. Whoever has the turn (turn.h) uses it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
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
  void push(Slice& slice) {
    slices_.push_back(&slice);
    forecast_ns_ += slice.forecast_ns;
  }
  Slice& take_first() {
    Slice& first = *slices_.front();
    forecast_ns_ -= first.forecast_ns;
    slices_.pop_front();
    return first;
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
  const std::deque<Slice*>& slices() const { return slices_; }

 private:
  std::deque<Slice*> slices_;
  int64_t forecast_ns_ = 0;
};

// What a client tells whoever supervises its workers, until somebody takes it.
class Events {
 public:
  bool empty() const { return events_.empty(); }
  void tell(uint32_t worker, EventKind kind, std::string reason) {
    if (events_.size() == kMaxEvents) events_.pop_front();
    events_.push_back({worker, kind, std::move(reason)});
  }
  std::vector<ClientEvent> take() {
    std::vector<ClientEvent> taken(events_.begin(), events_.end());
    events_.clear();
    return taken;
  }

 private:
  std::deque<ClientEvent> events_;
};

// How the worker stands is the worst of what speaks against it: the loss of its path, a stall, a
// silence (liveness.h), a late answer. It changes only in the functions under "standing", which
// tell everything that a supervisor has to know, once.
class Link {
 public:
  Link(NewWorker worker, uint32_t worker_index, Events& events)
      : name(std::move(worker.name)),
        index(worker_index),
        is_last_resort(worker.is_last_resort),
        path(std::move(worker.path)),
        liveness(std::move(worker.pulse)),
        policy(worker.policy),
        request_dtype(worker.request_dtype),
        reply_dtype(worker.reply_dtype),
        window(worker.policy.window),
        events_(events) {}

  // Whether the worker is expected to make progress, so that standing still counts against it.
  bool owes() const { return path.owes() || path.state() == PathState::kLeased; }
  // Whether its path takes slices now, however the worker stands.
  bool can_send() const {
    return path.state() == PathState::kFresh || path.state() == PathState::kInUse;
  }
  // For how long its other hosts will have it first.
  int64_t behind_ns() const { return model.behind_ns(now_ns()); }
  // The time predicted for all that it has and all that waits for it.
  int64_t backlog_ns() const {
    return waiting.forecast_ns() + path.forecast_ns() + cut_ns + behind_ns();
  }
  // Why it is lost, worn or suspected; empty otherwise.
  std::string reason() const;
  // Such as "worker w1 was lost: hung up", and as an error " (layer model.layers.3.mlp.experts)".
  std::string lost_text() const { return "worker " + name + " was lost: " + path.reason(); }
  Error lost_error(const Layer& layer) const;
  // An error that begins with the worker, or with its data path, and names it as its place.
  Error error(ErrorCode code, const std::string& what) const {
    return Error{code, "worker " + name + " " + what}.at({name, {}, {}, {}});
  }
  Error path_error(const std::string& what) const {
    return Error{ErrorCode::kInvalidArgument, "the data path of worker " + name + " " + what}.at(
        {name, {}, {}, {}});
  }

  // -- standing --
  Standing standing() const {
    if (path.is_lost()) return Standing::kLost;
    if (is_suspect()) return Standing::kSuspect;
    return is_late_ ? Standing::kLate : Standing::kWell;
  }
  // Whether what it owes is asked of others without waiting any longer.
  bool is_suspect() const { return is_stalled() || answers_nothing(); }
  bool is_stalled() const { return stalled_at_.has_value(); }
  bool is_late() const { return is_late_; }
  // Whether it owes an answer and has given none for too long.
  bool answers_nothing() const { return silence_.is_suspect() && path.is_listening(); }
  // The same after it owes nothing any more, or was replaced: it has to answer something before it
  // is trusted again.
  bool is_distrusted() const { return silence_.is_suspect(); }
  const Silence& silence() const { return silence_; }
  // How long it may be silent: as long as what it owes may take, or owed on its former paths.
  int64_t silence_limit_ns(int64_t call_timeout_ns) const {
    return std::max({call_timeout_ns, silence_.limit_ns(), path.longest_limit_ns()});
  }
  int64_t lost_ns() const { return lost_ns_; }  // when it was lost last, by the watch clock

  // A request is about to be published in a slot.
  void ask(uint32_t slot, const Attempt& attempt) {
    if (!path.owes()) liveness.begin_to_owe(attempt.asked_ns);
    silence_.ask(attempt.asked_ns);
    path.put_in_flight(slot, attempt);
  }
  // The whole answer that was owed in a slot has come.
  void release(uint32_t slot, const WatchClock& clock) {
    path.release(slot);
    hear(clock.at_last_look());  // it was there at the last look, or came just after it
    if (is_late_) look_for_late(clock.at(now_ns()));
  }
  // A whole answer has come; the worker is trusted again.
  void hear(int64_t now) {
    if (silence_.hear(now, path.is_listening())) events_.tell(index, EventKind::kWell, "");
  }
  // Another holder has answered a slice: the worker is late until its own answer has come.
  void supersede(const Slice& slice) {
    if (!path.has_in_flight(slice)) return;
    path.supersede(slice);
    is_late_ = true;
  }
  void look_for_late(int64_t now);
  // It shows no progress since its counter is what it is now.
  void begin_stall() {
    stalled_at_ = liveness.counter();
    events_.tell(index, EventKind::kSuspect, "no progress");
  }
  void end_stall_if_it_moved() {
    if (!stalled_at_ || *stalled_at_ == liveness.counter()) return;
    stalled_at_.reset();
    events_.tell(index, EventKind::kWell, "");
  }
  void distrust() {
    silence_.suspect();
    events_.tell(index, EventKind::kSuspect, "answers nothing");
  }
  void lose(const std::string& reason, int64_t now);
  // The path changes, and a silence goes on.
  void renew(NewPath fresh, int64_t now, int64_t call_timeout_ns) {
    silence_.pause(now, silence_limit_ns(call_timeout_ns));
    path.renew(std::move(fresh));
    is_late_ = false;
  }
  // Another process may serve the lost worker from now on.
  void replace(NewPath fresh, OwnedFd pulse) {
    path.renew(std::move(fresh));
    liveness = Liveness(std::move(pulse));
  }
  // To be asked after anything by which a worker that drains may have become idle.
  void tell_if_idle() {
    if (admission == Admission::kDraining && num_chunks == 0 && waiting.empty() && !owes())
      events_.tell(index, EventKind::kIdle, "");
  }

  // -- what is known of it --
  const std::string name;
  const uint32_t index;  // by which holders name it
  const bool is_last_resort;
  Admission admission = Admission::kOpen;
  // Whether somebody brings the worker back if it is lost, so that it is worth waiting for.
  bool has_remedy = false;
  bool may_have_stand_in = false;  // whether another holder is named once it is suspected
  Path path;
  Liveness liveness;
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

 private:
  Events& events_;
  std::optional<uint64_t> stalled_at_;  // its progress counter when a stall began
  bool is_late_ = false;                // only judged where shards have several holders
  Silence silence_;
  int64_t lost_ns_ = 0;
};

// The workers of a client, by index.
using Links = std::span<const std::unique_ptr<Link>>;

// The workers, and by which settings and which clock they are judged: what all parts of the engine
// (engine.h) read. The engine alone adds workers and lets the clock look. All times named `now` are
// the clock's own.
struct Crew {
  ClientOptions options;
  std::vector<std::unique_ptr<Link>> links;
  WatchClock clock;
  int64_t now() const { return clock.at(now_ns()); }
};

// An answer that another holder gave instead is late until it has come.
inline void Link::look_for_late(int64_t now) {
  is_late_ = std::any_of(path.slots().begin(), path.slots().end(), [now](const Slot& slot) {
    if (slot.quarantine) return slot.quarantine->is_superseded;
    return slot.attempt.slice != nullptr && slot.attempt.is_late(now);
  });
}

inline void Link::lose(const std::string& reason, int64_t now) {
  path.lose(reason);
  liveness.close();
  stalled_at_.reset();
  is_late_ = false;
  silence_.forget();
  lost_ns_ = now;
  events_.tell(index, EventKind::kLost, reason);
}

inline std::string Link::reason() const {
  if (std::string of_path = path.reason(); !of_path.empty()) return of_path;
  return is_stalled() ? "shows no progress" : answers_nothing() ? "answers nothing" : "";
}

inline Error Link::lost_error(const Layer& layer) const {
  return Error{ErrorCode::kWorkerLost, lost_text() + " (layer " + layer.plan.name + ")"}.at(
      {name, layer.plan.layer, {}, {}});
}

}  // namespace dflash::client
