// An expert worker: holds shards, answers requests from one channel, and proves that it makes
// progress. Knows nothing about requests of users, models or sockets; the Python side feeds it
// layers and a channel.
//
// Shutdown order: stop() -> serve() returns -> channel destroyed -> pulse thread joined -> layers
// freed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/owned_fd.h"
#include "compute/cpu/cpu_backend.h"
#include "transport/channel.h"

namespace dflash::worker {

struct WorkerOptions {
  std::string name;
  compute::Isa isa = compute::Isa::kScalar;
  uint32_t num_threads = 1;
  std::vector<int> cpus;  // empty: not pinned
  int64_t spin_ns = 0;    // adaptive spin before sleeping; 0 where cores are oversubscribed
  double slowdown = 1.0;  // emulation: computation takes this many times longer
  // mapped: the files outlive the worker
  compute::WeightsLayout weights_layout = compute::WeightsLayout::kPacked;
  uint64_t memory_limit = 0;  // bytes that its weights may take; 0: no limit of its own
};

struct LayerShard {
  uint32_t layer = 0;
  uint32_t shard = 0;
};

// Counters since start; any thread may read.
struct WorkerStats {
  uint64_t calls, rows, pairs, request_bytes, reply_bytes, errors;
  int64_t compute_ns, queue_ns, busy_since_ns;
};

class ExpertWorker {
 public:
  // Without a `backend`: the CPU's, with the instruction set, threads and cpus of `options`;
  // otherwise those three are the backend's matter.
  static Result<std::unique_ptr<ExpertWorker>> create(
      const WorkerOptions& options, std::unique_ptr<compute::ExpertBackend> backend = nullptr);
  ~ExpertWorker();

  // Loading; from one thread, before serve(). The fingerprint must be echoed by every request for
  // this shard. Errors: kInvalidArgument where the experts would take more than the memory limit,
  // before any of that memory is touched; those of ExpertBackend.
  Status define_shard(LayerShard where, const compute::FfnSpec& spec, uint32_t num_local_experts,
                      compute::ResidentFormats formats, uint64_t weights_fingerprint,
                      compute::NumericsClass numerics = compute::kDefaultNumerics);
  Status load_expert(LayerShard where, uint32_t local_expert_id,
                     const compute::ExpertWeights& weights);
  uint64_t resident_bytes() const;

  // Sends {magic u32 "PULS", version u32, counter u64} little-endian on `socket` every 100 ms from
  // its own C++ thread (never blocks: a full socket drops the pulse). One pulse per session;
  // replaces the former one.
  Status start_pulse(OwnedFd socket);
  void stop_pulse();

  // Answers requests until stop(), hang-up or a protocol violation. Bad requests that decode get an
  // error reply and do not end the session; a header that does not decode does (kProtocol).
  Status serve(std::unique_ptr<transport::Channel> channel, uint64_t generation);
  // Any thread. Ends the session of this generation (never 0), whether serve() has begun or not,
  // within 50 ms; a computation under way ends first.
  void stop(uint64_t generation);

  uint64_t progress() const;
  bool is_mapped() const;  // computes from the files that experts were loaded from
  WorkerStats stats() const;

 private:
  ExpertWorker();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::worker
