// An expert worker. It serves shards that it has borrowed from a store, answers requests from one
// channel, and proves that it makes progress. It knows nothing about requests of users, models or
// sockets; the Python side gives it shards and a channel.
//
// The order of shutdown: stop(), then serve() returns, the channel is destroyed, the pulse's thread
// is joined and the shards are given back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>

#include "base/result.h"
#include "store/resident_shard.h"
#include "transport/channel.h"
#include "transport/secure/stream_socket.h"

namespace dflash::worker {

struct WorkerOptions {
  std::string name;
  int64_t spin_ns = 0;  // the least time to spin before sleeping; 0 where cores are oversubscribed
  double slowdown = 1.0;  // emulates a slow worker: computing takes this many times as long
};

// What requests name: a shard of a layer.
struct LayerShard {
  uint32_t layer = 0;
  uint32_t shard = 0;
};

// Counts since the start, in bytes and nanoseconds; busy_since_ns is 0 while nothing is answered.
// The time of a batch that several sessions had in common counts for each by its pairs.
struct WorkerStats {
  uint64_t calls, rows, pairs, request_bytes, reply_bytes, errors;
  int64_t compute_ns, queue_ns, busy_since_ns;
  store::BatchCounts own;  // the batches that requests of this session were in
};

class ExpertWorker {
 public:
  // Errors: kInvalidArgument for a slowdown that is out of range.
  static Result<std::unique_ptr<ExpertWorker>> create(const WorkerOptions& options);
  ~ExpertWorker();

  // Holds a shard; called from one thread while serve() does not run. Requests for `where` are then
  // computed with `shard`, a loan that this worker keeps until give_back(), and must echo its
  // fingerprint. Errors: kInvalidArgument where something is held there already, or where the
  // shard's number of experts is out of range.
  Status hold(LayerShard where, std::shared_ptr<store::ResidentShard> shard);
  // The loan, for a caller who asks about its contents, or null where nothing is held. Called from
  // the thread of hold().
  std::shared_ptr<store::ResidentShard> held(LayerShard where) const;
  // Gives all loans back; called from the thread of hold(), while serve() does not run.
  void give_back();

  // Sends a pulse (wire/frame.h) on `socket` every 100 ms from a C++ thread of its own. It never
  // blocks: a full socket drops the pulse. A session has one pulse, and a new one replaces the
  // former. Errors: kInvalidArgument without a socket, kSystem.
  Status start_pulse(transport::StreamSocket socket);
  void stop_pulse();

  // Answers requests until stop(), a hang-up or a violation of the protocol. It runs on the
  // caller's thread, which also computes. A bad request that decodes gets an error reply and does
  // not end the session; a header that does not decode ends it (kProtocol).
  Status serve(std::unique_ptr<transport::Channel> channel, uint64_t generation);
  // Begins a session without a thread of its own: the caller then answers requests with
  // serve_one(), one thread at a time, and serve() does not run meanwhile.
  void begin_session(uint64_t generation);
  // Answers the oldest request that has come, on the caller's thread, and returns whether there was
  // one. It waits for none. Errors are those of serve(), and kClosed after stop().
  Result<bool> serve_one(transport::Channel& channel);
  // Ends the session of this generation (which is never 0), whether serve() has begun or not; any
  // thread. It takes at most 50 ms, after a computation that is under way has ended.
  void stop(uint64_t generation);

  // Any thread.
  uint64_t progress() const;
  WorkerStats stats() const;

 private:
  ExpertWorker();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::worker
