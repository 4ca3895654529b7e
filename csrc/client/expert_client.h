// The host's side of the exchange: turns (hidden_states, topk_ids, topk_weights) into one ragged
// request per slice and shard, keeps credits, deadlines and liveness of every worker, and combines
// replies in ascending shard id.
//
// Any thread may call. One thread at a time has the turn (turn.h) and drives progress for all, the
// others sleep until their call is done.
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

// A submitted call. One that is no longer wanted must be abandoned, not merely dropped: only
// abandon() ensures that `output` is not written and the batch not read any more.
class Call;
using CallPtr = std::shared_ptr<Call>;

class ExpertClient {
 public:
  explicit ExpertClient(const ClientOptions& options);
  ~ExpertClient();

  // -- workers and layers --
  // Returns the worker's index. Errors: kInvalidArgument.
  Result<uint32_t> add_worker(NewWorker worker);
  Status define_layer(const LayerPlan& plan);
  // Both concern calls that are cut from now on.
  Status set_policy(uint32_t worker, SlicePolicy policy);
  Status set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype);
  // Declares a worker lost from outside (its process was reaped, its control connection hung up).
  void mark_lost(uint32_t worker, const std::string& reason);

  // -- calls --
  // Validates, sends what fits and returns. Errors: kInvalidArgument naming argument, token and
  // value; kWorkerLost.
  Result<CallPtr> submit(const TokenBatch& batch, uint32_t layer);
  // Drives progress until the call is done or `tick` passes, once where it has passed before. True:
  // done, and outcome() tells how.
  bool wait(const CallPtr& call, Deadline tick);
  // Handles what has arrived, without sleeping, unless another thread does.
  bool is_done(const CallPtr& call);
  // Of a call that is done.
  Status outcome(const CallPtr& call);
  // Once it returned, the client touches neither the batch nor `output`. Nothing happens to a call
  // that is done.
  void abandon(const CallPtr& call);

  // -- between calls --
  // Whoever holds the client may change what concerns all calls: other calls are parked and wait,
  // each under its own deadline, until resume(). hold() waits for another holder until `tick`, the
  // other two for what they name; all three are to be repeated by a caller who can wait longer.
  bool hold(Deadline tick);
  bool wait_until_quiet(Deadline tick);  // no call is under way, and no path worn
  bool wait_until_fit(Deadline tick);    // besides, every path has all its slots
  void resume();
  // For an owner who lets go of the client while other threads are inside: nobody waits for a
  // holder or for a fresh path any more, parked calls end (kClosed), and none is taken. Calls under
  // way go on.
  void close();

  // -- data paths --
  // A descriptor that is readable while a path waits to be renewed, and after wake_renewer(); the
  // client's own, negative where the system had none left.
  int worn_fd() const;
  // For whoever wants the renewing thread to look up.
  void wake_renewer();
  // Those paths, retired: the caller renews each of them, or marks its worker lost.
  std::vector<WornPath> retire_worn_paths();
  // Retires a path that is not worn; its worker has nothing in flight. Errors: kInvalidArgument,
  // kWorkerLost.
  Status retire_path(uint32_t worker, const std::string& reason);
  // A fresh path: new channel, new generation, all slots. Errors: kInvalidArgument where replies
  // are owed, kWorkerLost.
  Status renew_path(uint32_t worker, NewPath path);

  // -- device steps --
  // The holder's, once the client is quiet and fit: hands every worker's data path over for a step
  // of up to `num_calls` calls. Errors, nothing is then handed over: kUnsupported naming a worker
  // whose transport is no ring, kWorkerLost.
  Result<StepLease> begin_step(uint32_t num_calls);
  // Reads pulses; to be called every few milliseconds of a step. Errors: kWorkerLost naming the
  // first worker that is lost.
  Status judge_step();
  void end_step(const StepResult& result);

  // -- what is known --
  std::vector<CountersOf> counters() const;
  std::vector<WorkerReport> workers() const;
  std::vector<WorkerForecast> forecasts() const;
  void set_profile(bool on);  // keeps at most 65,536 traces
  std::vector<SliceTrace> take_traces();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::client
