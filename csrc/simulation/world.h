// What hosts and workers of one simulation share: time, the record of events, the options drawn
// from the seed, the processes, and what each host has with each of them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "simulation/expected_losses.h"
#include "simulation/journal.h"
#include "simulation/options.h"
#include "simulation/random.h"
#include "simulation/scheduler.h"
#include "simulation/worker_process.h"

namespace dflash::simulation {

// What is the case with one worker's process.
struct SimulatedWorker {
  std::vector<std::unique_ptr<WorkerProcess>> processes;  // the last one is the present one
  int64_t crashes_until_ns = 0;  // until then its process dies whenever it is started

  WorkerProcess& process() { return *processes.back(); }
};

// What is the case between one host and one worker.
struct WorkerOfHost {
  Network network;
  uint32_t num_faults = 0;  // that are under way, of the process or of what is between them
  bool is_unfit = false;    // what it loads next for this host is not what it held before
  bool is_attached = false;
  uint64_t num_losses = 0;  // how often the host has given it up
  int64_t replied_ns = 0;   // when something of it last came
  // Since when nothing has been wrong with it that may fail a call of this host; max() while
  // something is. What another host does to itself or to its own network is nothing of the kind.
  int64_t healthy_since_ns = std::numeric_limits<int64_t>::max();
};

// What is known of one host by whoever checks it.
struct HostRecord {
  Task* task = nullptr;
  std::vector<WorkerOfHost> workers;
  LinkCounts sent;  // on all paths
  ExpectedLosses expected_losses;
  int64_t away_ns = 0;           // for how long nobody of the host could look
  int64_t longest_limit_ns = 0;  // of a call, from its beginning to its deadline
  int64_t last_look_ns = 0;
  // By call: the paths closed before its first request.
  std::map<uint64_t, uint64_t> closed_before;
};

class World {
 public:
  World(uint64_t seed, const Options& options);
  ~World();

  Scheduler scheduler;
  Journal journal;
  Random random;
  const Options options;
  std::vector<HostRecord> hosts;  // before the processes, whose links refer to it
  std::vector<SimulatedWorker> workers;
  std::array<uint64_t, kNumSimulatedFaults> num_faults{};  // that were injected, by kind
  std::vector<std::string> events_before_violation;        // the last ones before the first of them
  std::vector<std::string> violations;                     // of rules, each with its time

  void record(JournalEvent kind, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0) {
    journal.record(scheduler.now_ns(), kind, a, b, c);
  }
  void violate(std::string what);
  // By which number events and violations name a worker as one host has it.
  uint32_t label(uint32_t host, uint32_t worker) const { return 10 * host + worker; }
  LinkContext link_context(uint32_t host, uint32_t worker);
  // How many workers are other processes; the host's own copy of the weights comes after them.
  uint32_t num_remote() const {
    return static_cast<uint32_t>(workers.size()) - (options.workers.back().is_last_resort ? 1 : 0);
  }
  // A host has just looked at what had arrived.
  void look(uint32_t host);
  // A worker whose answers do not come on a path must be given up in twice the time of a call.
  void expect_loss_of_silent(uint32_t host, uint32_t worker, std::string why,
                             std::function<bool()> is_over, std::function<bool()> counts);
  // Looks at the number of a request's attempt: every holder is asked once, and once more for every
  // path that was lost meanwhile.
  void check_attempt(HostRecord& host, std::span<const std::byte> request);
  // Starts a process for a worker whose former one is dead.
  void start_process(uint32_t worker);
  // Says that something is wrong with a worker, and that it is over: for this host, or for all
  // where it is the process that is struck.
  void begin_fault(uint32_t host, uint32_t worker, SimulatedFault kind, int64_t duration_ns);
  void end_fault(uint32_t host, uint32_t worker, SimulatedFault kind);
  void set_attached(uint32_t host, uint32_t worker, bool is_attached);
  uint64_t next_generation() { return ++last_generation_; }

 private:
  // After a fault, requests that piled up meanwhile are still served.
  static constexpr int64_t kSettleNs = 2'000'000'000;  // for each host
  bool concerns(SimulatedFault kind, uint32_t host, uint32_t other) const {
    return host == other || is_of_process(kind);
  }
  uint64_t last_generation_ = 1;
};

}  // namespace dflash::simulation
