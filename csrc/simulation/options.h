// What a seed draws: how large the scene is, how fast its parts are, and what breaks how often.
// Each seed breaks a few kinds of things only ("swarm testing", Groce and others, 2012): a scene in
// which everything breaks at once hides what needs one thing to go on for long.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "simulation/faults.h"
#include "simulation/random.h"

namespace dflash::simulation {

struct SimulatedWorkerOptions {
  // Whether the host starts its process; otherwise somebody does, and hosts dial it.
  bool is_started_by_host = true;
  // The host's own copy of all experts, in its process: nothing happens to it.
  bool is_last_resort = false;
  int64_t ns_per_pair = 0;
};

// What lies between a host and a worker.
struct SimulatedNetworkOptions {
  bool is_stream = false;  // its path is a socket, otherwise a ring
  int64_t delay_ns = 0, jitter_ns = 0;
  double ns_per_byte = 0;
};

struct SimulatedHostOptions {
  std::vector<SimulatedNetworkOptions> networks;  // by worker
  uint32_t max_tokens = 0;
  uint32_t num_concurrent_calls = 0;
  int64_t think_ns = 0;  // mean time between two calls
  // Those that happen: its own, and for the first host also those of the workers' processes.
  std::vector<SimulatedFault> faults;
  int64_t fault_gap_ns = 0;  // mean time between two
};

struct Options {
  int64_t duration_ns = 0;  // of the time in which things break
  // One, or two that share all workers and know nothing of each other.
  std::vector<SimulatedHostOptions> hosts;
  std::vector<SimulatedWorkerOptions> workers;
  std::vector<std::vector<uint32_t>> shards;   // the experts of each, ascending
  std::vector<std::vector<uint32_t>> holders;  // the workers of each shard, the preferred one first
  // The host's own copy is made when a worker is suspected or lost, and holds nothing before.
  bool joins_late = false;
  uint32_t num_experts = 0;
  uint32_t num_slots = 0;
  uint64_t slot_bytes = 0;
  uint32_t slice_tokens = 0, window = 0;
  int64_t call_timeout_ns = 0, stall_timeout_ns = 0;
  uint32_t top_k = 0;
  int64_t restart_ns = 0;      // what starting a process takes
  int64_t load_ns = 0;         // what loading a worker's shards takes
  int64_t backoff_ns[2] = {};  // the first and the longest pause between two tries
  int64_t drain_ns = 0;        // for which a removed worker may finish what it has

  static Options of(uint64_t seed, int64_t duration_ns);
  // One line for each option.
  std::vector<std::string> lines() const;
};

}  // namespace dflash::simulation
