// What the client has learned about one worker: the curves of its link and of its compute, and for
// every size of chunk what was chosen, predicted and measured. It is fed from the timestamps of
// replies; nothing that a worker claims can make a prediction exceed what the host saw.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/cost_curve.h"
#include "client/slicing.h"

namespace dflash::client {

// The times of one request and its reply. Those named worker_* are of the worker's clock, all
// others of the host's.
struct ReplyTimes {
  int64_t encode_start_ns = 0, published_ns = 0, arrived_ns = 0;
  int64_t worker_received_ns = 0, worker_started_ns = 0, worker_finished_ns = 0;
  // How much of the time between receipt and start the worker spent on other hosts.
  int64_t worker_behind_ns = 0;
  // Whether the worker owed nothing when this was published, so that its way there was free.
  bool found_idle = false;
};

// The size of one slice.
struct SliceSize {
  uint32_t pairs = 0, experts = 0;  // experts are counted once each
  uint64_t request_bytes = 0, reply_bytes = 0;
};

// The chunks of one octave of tokens and one class of layers, for explanations.
struct ChunkRecord {
  static constexpr uint32_t kKept = 16;
  uint32_t cost_class = 0;
  uint32_t num_tokens = 0;  // of the last chunk
  SliceChoice choice;       // of the last chunk
  uint64_t num_chunks = 0;
  uint32_t num_measured = 0;
  // Nanoseconds from submit to the last reply, predicted and measured, of the last kKept chunks
  // that had the worker to themselves.
  std::array<double, kKept> predicted_ns{}, measured_ns{};
  // A chunk also waits for what none of its stages shows: for its turn at the host, which routes
  // the call and encodes for other workers first, and for a core where threads outnumber them.
  // Also, stages are fitted to their medians, and the median of a sum may be above the sum of
  // medians. `waited_ns` is what the stages left unexplained of each chunk kept, and `wait_ns` the
  // median of that, or 0 if it is negative. It is added to predictions.
  double wait_ns = 0;
  std::array<double, kKept> waited_ns{};
};

// What is known of one worker's speed, and what was made of that knowledge.
struct WorkerForecast {
  std::string name;
  CostCoefficients send, receive;  // by bytes
  // By class of layers; each is a cost by pairs and distinct experts.
  std::map<uint32_t, CostCoefficients> compute;
  // The mean relative deviations of recent predictions.
  double send_residual = 0, receive_residual = 0;
  std::map<uint32_t, double> compute_residual;
  std::vector<ChunkRecord> chunks;
  int64_t clock_offset_ns = 0;  // the worker's clock minus the host's
};

// Not thread-safe: whoever has the turn (turn.h) uses it.
class WorkerModel {
 public:
  // Chooses the slices for a chunk of a layer of class `cost_class`. With `is_fixed`, the caller's
  // number and window are taken, and the model only predicts their time.
  SliceChoice choose(uint32_t cost_class, const Chunk& chunk, uint32_t window, bool is_fixed);
  // Learns from one reply; implausible times are ignored.
  void observe(uint32_t cost_class, const SliceSize& size, const ReplyTimes& times);
  // A chunk that had the worker to itself took `measured_ns` from the begin of its call to the last
  // reply. What its stages do not explain of that is waiting (ChunkRecord::wait_ns).
  void record(uint32_t cost_class, uint32_t num_tokens, const SliceForecast& predicted,
              double measured_ns);

  // Forgets what was chosen and how it went, because another policy begins. What was learned stays.
  void forget_records() { records_.clear(); }

  // For how long a request will wait there behind those of other hosts, as those answered last
  // have; 0 where none was answered lately, so that a worker that was busy is tried again.
  int64_t behind_ns(int64_t now) const {
    return behind_ns_ == 0 || now - last_arrived_ns_ > kNewsNs ? 0 : behind_ns_;
  }

  const CostCurve& send() const { return send_; }
  const CostCurve& receive() const { return receive_; }
  const std::map<uint32_t, CostCurve>& compute() const { return compute_; }
  std::vector<ChunkRecord> records() const;
  // Everything that is known, for explanations.
  WorkerForecast report(const std::string& name) const;
  // The worker's clock minus the host's, 0 before the first reply. As in NTP, it is taken from the
  // round trip that spent the least time on the link, and is off by half of that time at most. Only
  // this epoch and the previous one count, 10 s each, because clocks drift. On one machine both
  // clocks are the same, and it is roughly 0.
  int64_t clock_offset_ns() const;

 private:
  // Longer than the pause between two calls of a host at work.
  static constexpr int64_t kNewsNs = 1'000'000'000;
  // One in so many parts of a former wait is no longer expected after a reply that waited for less.
  // Waits of a shared worker differ from reply to reply, and one that is forgotten too early makes
  // the next request look late.
  static constexpr int64_t kFadingOf = 4;

  struct Offset {
    int64_t link_ns = INT64_MAX;  // what request and reply spent on their way
    int64_t offset_ns = 0;
  };

  ChunkRecord& record_of(uint32_t cost_class, uint32_t num_tokens);
  void observe_clock(const ReplyTimes& times);

  CostCurve send_, receive_;
  std::map<uint32_t, CostCurve> compute_;  // by class of layers
  // By class of layers, then by octave of tokens.
  std::map<uint32_t, std::array<ChunkRecord, 33>> records_;
  Offset best_now_, best_before_;  // of this epoch and of the previous one
  int64_t epoch_began_ns_ = 0;
  int64_t last_arrived_ns_ = 0;
  int64_t behind_ns_ = 0;
};

}  // namespace dflash::client
