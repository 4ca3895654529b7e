// The progress engine: sends the parts of calls as credits allow, takes replies, judges workers,
// ends calls. Not thread-safe: whoever has the turn (turn.h) uses it. Sources: engine.cc (calls and
// sending), receive.cc (replies), verdict.cc (losses and deadlines), step.cc (device steps).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "client/buffer_pool.h"
#include "client/call.h"
#include "client/combine.h"
#include "client/expert_client.h"
#include "client/worker_link.h"
#include "wire/frame.h"

namespace dflash::client {

// One sleep at most; bounds how late a hang-up, a stall or a deadline is seen (a hang-up must be
// acted on within 100 ms).
inline constexpr int64_t kTickNs = 20'000'000;
inline constexpr size_t kMaxTraces = 65536;
// A call may take four times what is predicted, at most this many call timeouts: predictions rest
// on what workers say.
inline constexpr int64_t kPatience = 4, kMaxPatience = 20;

class Engine {
 public:
  explicit Engine(const ClientOptions& options) : options_(options) {}

  uint32_t add_worker(WorkerLink link);
  WorkerEnd* worker(uint32_t index) {
    return index < workers_.size() ? workers_[index].get() : nullptr;
  }
  uint32_t num_workers() const { return static_cast<uint32_t>(workers_.size()); }
  Status define_layer(const LayerPlan& plan);
  const Layer* layer(uint32_t index) const;

  // Memory for a new call, its lists empty.
  std::unique_ptr<CallWork> take_work();
  // Takes a routed call, sends what fits. Errors (the call was not taken): kInvalidArgument,
  // kWorkerLost.
  Status start(const CallPtr& call);
  // Sleeps at most until `tick`, one kTickNs, or the first event; then handles everything that
  // arrived and sends what fits.
  void drive(Deadline tick, int wake_fd);
  // Device steps, as ExpertClient says (step.cc).
  Result<std::vector<StepLane>> begin_step(uint32_t num_calls, uint64_t* first_call);
  Status judge_step(int64_t now);
  void end_step(std::span<const std::pair<uint32_t, uint32_t>> heads_and_tails,
                std::span<const StepMessage> answered, bool has_failed);

  // Ends an unfinished call; its slots in flight are quarantined.
  void fail(Call& call, Error error);
  // Gives a worker up and fails every call that needs it, after taking the replies that already
  // arrived.
  void lose_after_drain(WorkerEnd& worker, const std::string& reason);
  // Calls ended so far; a driver compares it to know whether sleepers must look at theirs.
  uint64_t num_ended() const { return num_ended_; }

  void set_profile(bool on) { is_profiling_ = on; }
  std::vector<SliceTrace> take_traces() { return std::exchange(traces_, {}); }

 private:
  Status refuse_lost_workers(const Call& call) const;
  Status cut(Call& call);
  Result<uint64_t> cut_shard_by_model(Call& call, uint32_t shard_index, WorkerEnd& worker);
  void enqueue_parts(Call& call);
  uint32_t count_experts(std::span<const uint16_t> local_expert_ids, size_t num_local_experts);
  void learn(WorkerEnd& worker, const Part& part, uint64_t reply_bytes);
  void pump();
  bool send_next(WorkerEnd& worker);
  void send(WorkerEnd& worker, Part& part, uint32_t slot);
  void finish(Call& call);
  void end(Call& call);
  void trace(const Call& call, const Part& part);
  void charge_wait(int64_t elapsed_ns);

  void receive(WorkerEnd& worker, transport::Arrival arrival);
  void drain(WorkerEnd& worker);
  void receive_late(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header);
  void receive_error(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header,
                     std::span<const std::byte> bytes);
  void receive_rows(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header,
                    std::span<const std::byte> bytes);

  void lose(WorkerEnd& worker, ErrorCode code, const std::string& reason);
  void judge_all(int64_t now);
  void end_late_calls(int64_t now);

  ClientOptions options_;
  std::vector<std::unique_ptr<WorkerEnd>> workers_;
  std::map<uint32_t, Layer> layers_;
  std::vector<CallPtr> calls_;  // not done yet
  uint64_t next_call_id_ = 1;
  uint64_t num_ended_ = 0;
  int64_t last_judged_ns_ = 0;
  std::vector<transport::WaitEntry> wait_entries_;      // [num_workers], reused
  std::vector<std::unique_ptr<CallWork>> spare_works_;  // of ended calls
  BufferPool reply_buffers_;
  Combiner combiner_;
  std::vector<uint32_t> sending_order_;  // reused by pump
  // reused by count_experts: the count in which an expert was last seen
  std::vector<uint64_t> expert_seen_;
  uint64_t num_counts_ = 0;
  bool is_profiling_ = false;
  std::vector<SliceTrace> traces_;
};

}  // namespace dflash::client
