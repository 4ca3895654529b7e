// The progress engine: cuts calls into parts, spends credits, takes replies, judges workers, ends calls. Not thread-safe: its owner
// (ExpertClient) holds one lock around every method.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "client/call.h"
#include "client/expert_client.h"
#include "client/worker_link.h"
#include "wire/frame.h"

namespace dflash::client {

// One sleep at most; bounds how late a hang-up, a stall or a deadline is seen (a hang-up must be acted on within 100 ms).
inline constexpr int64_t kTickNs = 20'000'000;
inline constexpr size_t kMaxTraces = 65536;

class Engine {
 public:
  explicit Engine(const ClientOptions& options) : options_(options) {}

  uint32_t add_worker(WorkerLink link);
  WorkerEnd* worker(uint32_t index) { return index < workers_.size() ? workers_[index].get() : nullptr; }
  uint32_t num_workers() const { return static_cast<uint32_t>(workers_.size()); }
  Status define_layer(const LayerPlan& plan);
  const Layer* layer(uint32_t index) const;

  // Takes a routed call, sends what fits. Errors (the call was not taken): kInvalidArgument, kWorkerLost.
  Status start(const CallPtr& call);
  // Sleeps at most until `tick`, one kTickNs, or the first event; then handles everything that arrived and sends what fits.
  void drive(Deadline tick, int wake_fd);
  // Ends an unfinished call; its slots in flight are quarantined.
  void fail(Call& call, Error error);
  // Gives a worker up and fails every call that needs it.
  void lose(WorkerEnd& worker, ErrorCode code, const std::string& reason);

  void set_profile(bool on) { is_profiling_ = on; }
  std::vector<SliceTrace> take_traces() { return std::exchange(traces_, {}); }

 private:
  Status cut(Call& call);
  Status cut_slice(Call& call, uint32_t shard_index, uint32_t row_end, uint16_t slice, Part& next);
  void pump();
  void send_waiting(WorkerEnd& worker);
  bool send(WorkerEnd& worker, Part& part, uint32_t slot);
  void receive(WorkerEnd& worker, transport::Arrival arrival);
  void drain(WorkerEnd& worker);
  void receive_late(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header);
  void receive_error(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header, std::span<const std::byte> bytes);
  void receive_rows(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header, std::span<const std::byte> bytes);
  void finish(Call& call);
  void judge_all(int64_t now);
  void end_late_calls(int64_t now);
  void charge_wait(int64_t elapsed_ns);
  std::vector<std::byte> take_buffer(size_t num_bytes);

  ClientOptions options_;
  std::vector<std::unique_ptr<WorkerEnd>> workers_;
  std::map<uint32_t, Layer> layers_;
  std::vector<CallPtr> calls_;  // not done yet
  uint64_t next_call_id_ = 1;
  int64_t last_judged_ns_ = 0;
  std::vector<transport::WaitEntry> wait_entries_;          // [num_workers], reused
  std::vector<std::vector<std::byte>> spare_buffers_;       // reply buffers of ended calls
  bool is_profiling_ = false;
  std::vector<SliceTrace> traces_;
};

}  // namespace dflash::client
