// An expert worker: serves shards that it borrowed from a store, answers requests from one channel,
// and proves that it makes progress. Knows nothing about requests of users, models or sockets; the
// Python side gives it shards and a channel.
//
// Shutdown order: stop() -> serve() returns -> channel destroyed -> pulse thread joined -> shards
// given back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "base/owned_fd.h"
#include "store/resident_shard.h"
#include "transport/channel.h"

namespace dflash::worker {

struct WorkerOptions {
  std::string name;
  int64_t spin_ns = 0;    // adaptive spin before sleeping; 0 where cores are oversubscribed
  double slowdown = 1.0;  // emulation: computation takes this many times longer
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
  // Errors: kInvalidArgument for a slowdown out of its range.
  static Result<std::unique_ptr<ExpertWorker>> create(const WorkerOptions& options);
  ~ExpertWorker();

  // From one thread, while serve() does not run. Requests for `where` are computed with `shard`, a
  // loan that this worker keeps until give_back(); they must echo its fingerprint. Errors:
  // kInvalidArgument where something is held there already, or the shard has no experts yet.
  Status hold(LayerShard where, std::shared_ptr<store::ResidentShard> shard);
  // The loan, for whoever asks about its contents; null where nothing is held. The thread of
  // hold().
  std::shared_ptr<store::ResidentShard> held(LayerShard where) const;
  void give_back();

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
  WorkerStats stats() const;

 private:
  ExpertWorker();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::worker
