// The kill campaign: a client and forked workers, two holders for every shard. Calls of all sizes
// run one after another or three at a time, and at a drawn moment of a drawn call a worker is
// killed, or stopped for a while. Every output is compared bit for bit with that of a run without
// faults.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "client/expert_client.h"
#include "failover/rounds.h"
#include "failover/worker_process.h"

namespace dflash::failover {

struct CampaignOptions {
  std::string transport = "shared";  // a name of transport_kinds()
  uint64_t seed = 0;                 // of all that is drawn
  uint32_t num_kills = 0;            // of a worker whose shards have another holder
  uint32_t num_stops = 0;            // likewise, with SIGSTOP, then SIGCONT
  uint32_t num_lone_kills = 0;       // of a shard's only holder, which comes back
  uint32_t baseline_rounds = 20;     // of each shape, before the first event
  int64_t stall_timeout_ns = 2'000'000'000;
};

enum class EventKind : uint8_t { kKill, kStop, kLoneKill };
const char* event_name(EventKind kind);

// What one strike did.
struct StrikeEvent {
  EventKind kind = EventKind::kKill;
  Moment moment = Moment::kIdle;
  bool is_obeyed = true;  // false where the worker got no request, and was struck afterwards
  uint32_t worker = 0;
  pid_t pid = 0;
  uint32_t num_tokens = 0, num_calls = 0;  // of the round that it fell into
  std::vector<uint32_t> shapes;            // of its calls, for their median
  std::vector<double> call_ms;             // how long each of them took
  double stall_ms = 0;  // the longest time of a call beyond the median of its shape
  uint32_t num_failed = 0, num_wrong = 0;
  std::string error;  // of the first call that failed
};

struct CampaignReport {
  std::vector<StrikeEvent> events;
  uint64_t num_calls = 0, num_failed = 0, num_wrong = 0;  // of all rounds, struck ones or not
  std::string first_error;
  uint64_t num_lost_unasked = 0;  // workers that the client gave up and nobody had killed
  uint64_t num_unsettled = 0;     // stopped workers that were not well again after SIGCONT
  uint64_t failovers = 0, hedges = 0, hedges_won = 0, superseded = 0;
  std::array<double, kSizes.size()> usual_ms{};  // medians of undisturbed calls, by size
  size_t left_processes = 0, left_descriptors = 0, left_segments = 0;

  // Percentile of the stalls of one kind of event; 0 where there was none.
  double stall_ms(EventKind kind, double fraction) const;
  uint64_t count(EventKind kind) const;
};

// Runs one campaign. The process has one thread, and no children but those that it starts here.
// Errors: those of the system while something is set up. What goes wrong later is in the report.
Result<CampaignReport> run_campaign(const CampaignOptions& options);

}  // namespace dflash::failover
