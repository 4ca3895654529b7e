// The progress engine of a client. It composes the parts that do the work, each of which knows
// those before it and none behind it:
//
//   Calls     calls.h     begin, wait and end
//   Sending   sending.h   puts slices into free slots
//   Remedies  remedies.h  who is asked instead, or as well
//   Answers   answers.h   what arrives
//   Losses    losses.h    gives up workers, and calls whose time has passed
//
// Who of a shard's holders is asked for a slice is said by router.h: one that has to answer
// something before it is trusted again, if there is one, and others soon if it does not; else the
// one that stands best (well, late or suspected, the host's own copy, draining, answering nothing),
// of these the one with the shortest backlog, of these the one that is named first.
//
// Not thread-safe: whoever has the turn (turn.h) uses it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/layer_table.h"
#include "client/losses.h"

namespace dflash::client {

// A thread that sleeps until a time wakes up to 50 us late where timers are coalesced, and as much
// later where its core was halted. A wait for a reply ends its sleep so long before the reply is
// predicted, and spins from then on.
inline constexpr int64_t kWakeLeadNs = 150'000;

// When a function returns, no slice is without a worker that could have one, no call is parked that
// could be cut, and nothing waits for a credit that is free; only what has arrived since the last
// drive() is not known yet.
class Engine {
 public:
  explicit Engine(const ClientOptions& options);
  Engine(const Engine&) = delete;  // its parts refer to each other
  Engine& operator=(const Engine&) = delete;

  // -- workers and layers --
  uint32_t add_worker(NewWorker worker);
  Link* link(uint32_t worker) {
    return worker < crew_.links.size() ? crew_.links[worker].get() : nullptr;
  }
  Links links() const { return crew_.links; }
  Status define_layer(const LayerPlan& plan) { return layers_.define(plan, crew_.links.size()); }
  const LayerTable& layers() const { return layers_; }
  // Names the holders of a shard, preferred first. Slices that wait at others move. Errors:
  // kInvalidArgument.
  Status set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers);
  void set_admission(Link& link, Admission admission);
  // Says whether somebody brings the worker back if it is lost.
  void set_remedy(Link& link, bool has_remedy);
  Events& events() { return events_; }

  // -- calls --
  // Takes a routed call: it sends what fits, or parks the call. Errors, with which the call was not
  // taken: kInvalidArgument, kWorkerLost, kClosed.
  Status start(const CallPtr& call);
  void resume();
  Calls& calls() { return calls_; }

  // -- progress --
  // Sleeps until the first event, but at most until `tick` and one kTickNs. Then handles everything
  // that has arrived and sends what fits. `wake_fd` is as in transport::wait_any.
  void drive(Deadline tick, int wake_fd);
  // Whether waits may spin, where the options let them.
  void set_spinning(bool is_allowed) { spin_ns_ = is_allowed ? crew_.options.spin_ns : 0; }

  // -- data paths --
  // Gives a worker up, after taking the answers that have come. What it owed is asked of others;
  // calls for which there is nobody else end.
  void lose_after_drain(Link& link, const std::string& reason);
  // Gives the link a fresh path; nothing may be in flight on the old one. Errors: kWorkerLost,
  // kInvalidArgument.
  Status renew_path(Link& link, NewPath path);
  // Takes a lost worker back. Errors: kInvalidArgument.
  Status replace_worker(Link& link, NewPath path, OwnedFd pulse);
  // Wears out every living path that has a slot in quarantine, for a caller who needs all slots.
  void wear_out_unfit();
  // Reads the pulses of a worker, and returns how long ago the last one was read.
  int64_t pulse_age_ns(Link& link);
  // Retires all paths that are worn and idle. The caller then renews them.
  std::vector<WornPath> retire_worn_paths();
  bool has_path_to_retire() const;
  // Retires a path that need not be worn. Errors: kWorkerLost, kInvalidArgument where something is
  // in flight.
  Status retire_path(Link& link, const std::string& reason);

  // -- device steps (step.h) --
  // Whether a step cannot begin yet, but will be able to once calls have ended and paths were
  // renewed.
  bool must_step_wait();
  Result<StepLease> begin_step(uint32_t num_calls);
  // Reads the pulses of the leased paths. Errors as of Losses::judge_step().
  Status judge_step();
  void end_step(const StepResult& result);

 private:
  void settle() { settle(crew_.now()); }
  void settle(int64_t now);
  void wait_for_reply(Deadline until, int64_t now, int wake_fd);
  int64_t next_reply_ns() const;
  int64_t next_look_ns() const;
  void charge_wait(int64_t elapsed_ns);
  Status check_idle(const Link& link) const;

  Crew crew_;
  Events events_;
  LayerTable layers_;
  BufferPool reply_buffers_;
  LateWatch late_watch_;
  OpenStep step_;
  Calls calls_;
  Sending sending_;
  Remedies remedies_;
  Answers answers_;
  Losses losses_;
  int64_t spin_ns_;                                 // how long a wait spins now
  std::vector<transport::WaitEntry> wait_entries_;  // [num_workers], used again by each drive()
};

}  // namespace dflash::client
