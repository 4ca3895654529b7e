// The host's side of the exchange: turns (hidden_states, topk_ids, topk_weights) into one ragged
// request per slice and shard, keeps credits, deadlines and liveness of every worker, and combines
// replies in ascending shard id.
//
// Any thread may call; one thread at a time drives progress for all (the others sleep until their
// call is done).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/owned_fd.h"
#include "client/worker_model.h"
#include "transport/channel.h"

namespace dflash::client {

struct ClientOptions {
  int64_t spin_ns = 0;
  // per call, from submit; more where the model predicts more (kMaxPatience)
  int64_t call_timeout_ns = 30'000'000'000;
  int64_t stall_timeout_ns = 2'000'000'000;  // frozen progress counter while work is queued
  // calls submitted and not yet done; more is kInvalidArgument ("drain first")
  uint32_t max_calls = 1024;
};

// Slicing of one worker: a mode is nothing but this.
struct SlicePolicy {
  uint32_t slice_tokens = 1024;  // a call is cut evenly into ceil(T / slice_tokens) token ranges
  uint32_t window = 2;           // slices in flight at one worker, <= num_slots
  // true: both are upper bounds, and every chunk gets what the worker's model predicts to be
  // fastest
  bool is_measured = false;
};

struct WorkerLink {
  std::string name;
  std::unique_ptr<transport::Channel> channel;
  uint64_t generation = 0;
  OwnedFd pulse;  // peer of ExpertWorker::start_pulse; -1 for loopback
  SlicePolicy policy;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
};

struct ShardPlace {
  uint32_t shard = 0;   // id; shards of a layer are combined in ascending id
  uint32_t worker = 0;  // index from add_worker
  uint64_t weights_fingerprint = 0;
  std::vector<uint32_t> experts;  // global ids, ascending; local id = position
};

struct LayerPlan {
  uint32_t layer = 0;
  std::string name;
  uint32_t in_size = 0, out_size = 0, num_experts = 0;
  std::vector<ShardPlace> shards;  // every expert in exactly one
  // layers of equal class have experts of equal shape and format: they share a cost curve
  uint32_t cost_class = 0;
};

struct TokenBatch {
  // [num_tokens, in_size], rows contiguous, row_stride_bytes apart; kept by the caller
  const std::byte* hidden_states = nullptr;
  int64_t row_stride_bytes = 0;  //   unchanged until the call is done
  Dtype dtype = Dtype::kF32;     // of hidden_states and of the result
  uint32_t num_tokens = 0, top_k = 0;
  // [num_tokens, top_k] contiguous, int32 or int64; copied by submit()
  const void* topk_ids = nullptr;
  // ids outside [0, num_experts) are sentinels and dropped when >= num_experts; < 0 is an error
  bool ids_are_64bit = false;
  // [num_tokens, top_k] contiguous in weights_dtype; widened exactly
  const std::byte* topk_weights = nullptr;
  Dtype weights_dtype = Dtype::kF32;
  // [num_tokens, out_size] contiguous in dtype, every element written
  std::byte* output = nullptr;
};

// A submitted call. One that is no longer wanted must be abandoned, not merely dropped: only
// abandon() ensures that `output` is not written and the batch not read any more. Late replies are
// discarded.
class Call;
using CallPtr = std::shared_ptr<Call>;

struct Counters {  // per (worker, layer)
  uint64_t calls = 0, rows = 0, pairs = 0, request_bytes = 0, reply_bytes = 0, floor_bytes = 0;
  // time result() spent with nothing else to do while this worker's reply was outstanding
  int64_t wait_ns = 0;
  int64_t worker_compute_ns = 0, worker_queue_ns = 0;  // from ReplyTiming
  uint64_t splits = 0;  // slices cut smaller than the policy because a slot was too small
};

enum class WorkerState : uint8_t { kReady, kLost };
struct WorkerReport {
  std::string name;
  WorkerState state;
  std::string reason;  // why it was lost
  uint32_t quarantined_slots;
  uint64_t stale_replies;  // arrived after their call ended
  uint64_t generation;
};

// What is known of one worker's speed, and what was made of it.
struct WorkerForecast {
  std::string name;
  CostCoefficients send, receive;  // by bytes
  // by class of layers: by pairs and distinct experts
  std::map<uint32_t, CostCoefficients> compute;
  // mean relative deviation of recent predictions
  double send_residual = 0, receive_residual = 0;
  std::map<uint32_t, double> compute_residual;
  std::vector<ChunkRecord> chunks;
  int64_t clock_offset_ns = 0;  // worker's clock minus the host's
};

// One recorded slice, for the timeline (profile on): host CLOCK_MONOTONIC except the worker_*
// times.
struct SliceTrace {
  uint64_t call_id;
  uint32_t layer, shard, worker;
  uint16_t slice;
  uint32_t num_rows;
  int64_t encode_start_ns, published_ns, arrived_ns, combined_ns;
  int64_t worker_received_ns, worker_started_ns, worker_finished_ns;
};

// A worker's data path while a device of the host uses it instead of this client.
struct StepLane {
  uint32_t worker = 0;
  std::string name;
  uint64_t generation = 0;
  transport::SlotGeometry geometry;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  transport::RingView ring;
};
struct StepMessage {  // that was answered
  uint32_t worker = 0, layer = 0;
  uint32_t num_rows = 0, num_pairs = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;
};

class ExpertClient {
 public:
  explicit ExpertClient(const ClientOptions& options);
  ~ExpertClient();

  Result<uint32_t> add_worker(WorkerLink link);
  // New data path for a worker with no call in flight (new generation, new slots: quarantine ends).
  Status replace_channel(uint32_t worker, std::unique_ptr<transport::Channel> channel,
                         uint64_t generation);
  Status set_policy(uint32_t worker, SlicePolicy policy);
  Status set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype);
  Status define_layer(const LayerPlan& plan);

  // Validates, encodes what fits and returns. Errors: kInvalidArgument (names argument, token,
  // value), kWorkerLost.
  Result<CallPtr> submit(const TokenBatch& batch, uint32_t layer);
  // Drives progress until the call is done or `tick` passes. true: done (then error() tells how).
  // Never holds the GIL.
  bool wait(const CallPtr& call, Deadline tick);
  // Handles what has arrived, without sleeping, unless another thread does.
  bool is_done(const CallPtr& call);
  // Outcome of a done call.
  Status outcome(const CallPtr& call);
  // Once it returned, the client touches neither the batch nor `output`. Nothing happens to a call
  // that is done.
  void abandon(const CallPtr& call);

  // Hands every worker's data path over for a device step of up to `num_calls` calls, whose ids
  // begin at `first_call`. Errors, nothing is then handed over: kUnsupported naming a worker whose
  // transport is no ring; kWorkerLost; kInvalidArgument where replies are owed or a step is open.
  Result<std::vector<StepLane>> begin_step(uint32_t num_calls, uint64_t* first_call);
  // Reads pulses; the loss of the first worker that was lost since, if any. To be called every few
  // milliseconds of a step.
  Status judge_step();
  // The step is over: heads and tails by lane, in the order of begin_step. `has_failed`: every path
  // of it must be replaced before it is used again.
  void end_step(std::span<const std::pair<uint32_t, uint32_t>> heads_and_tails,
                std::span<const StepMessage> answered, bool has_failed);

  // Declares a worker lost from outside (control connection hung up, process reaped). Any thread.
  void mark_lost(uint32_t worker, const std::string& reason);

  // ((worker, layer), counters)
  std::vector<std::pair<std::pair<uint32_t, uint32_t>, Counters>> counters() const;
  std::vector<WorkerReport> workers() const;
  std::vector<WorkerForecast> forecasts() const;
  void set_profile(bool on);  // keeps at most 65,536 traces
  std::vector<SliceTrace> take_traces();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::client
