// The host's side of the exchange. It turns (hidden_states, topk_ids, topk_weights) into one ragged
// request per slice and shard, keeps the credits, deadlines and liveness of every worker, and
// combines replies in ascending shard id.
//
// Any thread may call anything here. One thread at a time has the turn (turn.h) and drives progress
// for all; the others sleep until their calls are done.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "base/token_batch.h"
#include "client/types.h"
#include "client/worker_model.h"

namespace dflash::client {

// A submitted call. One that is no longer wanted must be abandoned and not merely dropped: only
// abandon() ensures that `output` is not written and the batch not read any more.
class Call;
using CallPtr = std::shared_ptr<Call>;

// Destroying it closes the channels. No thread may be inside then, which the bindings see to.
class ExpertClient {
 public:
  explicit ExpertClient(const ClientOptions& options);
  ~ExpertClient();

  // -- workers and layers --
  // Returns the worker's index, which later calls name. Errors: kInvalidArgument.
  Result<uint32_t> add_worker(NewWorker worker);
  // Errors: kInvalidArgument naming what is wrong with the plan.
  Status define_layer(const LayerPlan& plan);
  // Names the workers that hold a shard, preferred first, and takes the place of those named
  // before; any time. They compute the same bits: whoever calls this has compared weights,
  // checksums and classes. Slices that wait at others move, those under way there go on. Errors:
  // kInvalidArgument naming layer and shard, also where wire dtypes differ.
  Status set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers);
  // A worker that drains gets no new slices where another holder can have them; kIdle tells when it
  // has none left. Errors: kInvalidArgument.
  Status set_admission(uint32_t worker, Admission admission);
  // Says whether somebody brings the worker back if it is lost. Calls that need it then wait, up to
  // ClientOptions::park_ns. Errors: kInvalidArgument.
  Status set_remedy(uint32_t worker, bool has_remedy);
  // Says whether another holder will be named once the worker is suspected. A call then waits for
  // that beyond its deadline, until a worker that has answered nothing is given up. Errors:
  // kInvalidArgument.
  Status set_stand_in(uint32_t worker, bool may_come);
  // Both of the following apply to calls that are cut from now on. Errors: kInvalidArgument.
  Status set_policy(uint32_t worker, SlicePolicy policy);
  Status set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype);
  // Declares a worker lost for a reason seen outside (its process was reaped, its control
  // connection hung up).
  void mark_lost(uint32_t worker, const std::string& reason);

  // -- calls --
  // Validates a call, sends what fits and returns. The batch must stay valid until the call is done
  // or abandoned. Errors: kInvalidArgument naming argument, token and value; kWorkerLost.
  Result<CallPtr> submit(const TokenBatch& batch, uint32_t layer);
  // Drives progress until the call is done or `tick` passes. Returns whether it is done; outcome()
  // then says how.
  bool wait(const CallPtr& call, Deadline tick);
  // Handles what has arrived without sleeping, unless another thread does so already. Returns
  // whether the call is done.
  bool is_done(const CallPtr& call);
  // Returns how a call ended; the call must be done.
  Status outcome(const CallPtr& call);
  // Ends a call. Once this has returned, the client touches neither the batch nor `output`. Nothing
  // happens to a call that is done.
  void abandon(const CallPtr& call);

  // -- between calls --
  // Whoever holds the client may change what concerns all calls. Other calls are parked until
  // resume() and wait there, each under its own deadline. hold() waits for another holder to
  // finish, the other two for what stands beside them, each until `tick`. All three return whether
  // it came about, and a caller who can wait longer repeats them.
  bool hold(Deadline tick);
  // No call is under way. Paths may be worn: whoever renews them does so meanwhile, or later.
  bool wait_until_quiet(Deadline tick);
  // No call is under way, and whether a device step can begin does not hang on a path that is being
  // renewed. Paths that lack slots are renewed from here on, and waited for where nobody else holds
  // their shards.
  bool wait_until_fit(Deadline tick);
  void resume();
  // For an owner who lets go of the client while other threads are inside: nobody waits for a
  // holder or for a fresh path any more, parked calls end (kClosed), and none is taken. Calls under
  // way go on.
  void close();

  // -- data paths --
  // A descriptor that is readable while a path waits to be renewed, and after wake_renewer(). It
  // belongs to the client, and is negative where the system had none left.
  int worn_fd() const;
  // Makes the thread that renews paths look up.
  void wake_renewer();
  // Retires the paths that wait. The caller renews each of them, or marks its worker lost.
  std::vector<WornPath> retire_worn_paths();
  // Reads the pulses of a worker, and returns how long ago the last one was read: whoever waits for
  // its answer on another way learns whether it runs. Errors: kInvalidArgument.
  Result<int64_t> pulse_age_ns(uint32_t worker);
  // Retires a path that need not be worn; its worker must have nothing in flight. Errors:
  // kInvalidArgument, kWorkerLost.
  Status retire_path(uint32_t worker, const std::string& reason);
  // Gives a worker a fresh path: a new channel, a new generation, all slots. Errors:
  // kInvalidArgument where replies are owed, kWorkerLost.
  Status renew_path(uint32_t worker, NewPath path);
  // Takes a lost worker back, which another process may serve now: a fresh path and fresh pulses.
  // Counters and what was learned of its speed go on, its shards stay; calls submitted from now on
  // use it. The path's generation must not be the one that was lost, so that nothing old passes for
  // an answer. A device step that is under way goes on without it. Errors: kInvalidArgument where
  // the worker is not lost.
  Status replace_worker(uint32_t worker, NewPath path, OwnedFd pulse);

  // -- events --
  // A descriptor that is readable while events wait. It belongs to the client, and is negative
  // where the system had none left.
  int event_fd() const;
  // Returns what has happened since the last call of this.
  std::vector<ClientEvent> take_events();

  // -- device steps --
  // Hands over the data paths that a step of up to `num_calls` calls needs: those of one holder for
  // each shard. Only the holder of the client may call this, once the client is fit. Errors, with
  // which nothing is handed over: kWorkerLost naming all holders of a shard, kUnsupported naming a
  // worker whose transport has no ring or whose slots are too few, kInvalidArgument where a path is
  // in use.
  Result<StepLease> begin_step(uint32_t num_calls);
  // Reads pulses. It is to be called every few milliseconds of a step (step_watch.h). Errors, with
  // which the step must end: kWorkerLost naming the first worker of the step that is lost, kTimeout
  // naming one that shows no progress while others hold all that the step asks of it.
  Status judge_step();
  // Takes the paths back and books what was answered on them.
  void end_step(const StepResult& result);

  // -- what is known --
  std::vector<CountersOf> counters() const;
  std::vector<WorkerReport> workers() const;
  std::vector<WorkerForecast> forecasts() const;
  // Whether waits may spin, where the options let them. A host that computes while it waits, with
  // another thread, needs the core that a spinning wait would take.
  void set_spinning(bool is_allowed);
  void set_profile(bool on);  // while it is on, up to 65,536 traces are kept
  std::vector<SliceTrace> take_traces();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::client
