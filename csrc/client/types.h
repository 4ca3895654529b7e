// What goes into a client and comes out of it, as plain values: workers and their data paths,
// layers and their shards, counters and reports. Nothing here has behaviour, so that every file of
// this room and every program may include it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/owned_fd.h"
#include "transport/channel.h"

namespace dflash::client {

struct ClientOptions {
  int64_t spin_ns = 0;  // before a wait for replies sleeps; 0 where cores are short
  // Of a call, from submit. A call for which the workers' models predict more gets more (engine.h).
  int64_t call_timeout_ns = 30'000'000'000;
  // A worker whose progress counter stands still for so long while it owes replies is lost.
  int64_t stall_timeout_ns = 2'000'000'000;
  uint32_t max_calls = 1024;  // submitted and not yet done; one more is refused
};

// How calls are cut for one worker: a mode is nothing but this.
struct SlicePolicy {
  uint32_t slice_tokens = 1024;  // a call is cut evenly into ceil(T / slice_tokens) token ranges
  uint32_t window = 2;           // slices in flight at the worker
  // True: both are upper bounds, and every chunk is cut as the worker's model predicts to be best.
  bool is_measured = false;
};

// The two ends that a new data path has at the host.
struct NewPath {
  std::unique_ptr<transport::Channel> channel;
  uint64_t generation = 0;  // that the worker serves this channel under; never one used before
};

struct NewWorker {
  std::string name;
  NewPath path;
  OwnedFd
      pulse;  // where the worker's pulses arrive (wire/pulse.h); none for a worker in this process
  SlicePolicy policy;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
};

struct ShardPlace {
  uint32_t shard = 0;   // id; the shards of a layer are added in ascending id
  uint32_t worker = 0;  // its holder: the index that add_worker returned
  uint64_t weights_fingerprint = 0;
  std::vector<uint32_t> experts;  // global ids, ascending; an expert's local id is its position
};

struct LayerPlan {
  uint32_t layer = 0;  // index in the layer table
  std::string name;
  uint32_t in_size = 0, out_size = 0, num_experts = 0;
  std::vector<ShardPlace> shards;  // every expert is in exactly one
  // Layers of equal class have experts of equal shape and format, and share a cost curve.
  uint32_t cost_class = 0;
};

// Of one worker and layer, since start.
struct Counters {
  uint64_t calls = 0, rows = 0, pairs = 0;  // calls: requests sent
  uint64_t request_bytes = 0, reply_bytes = 0;
  uint64_t floor_bytes = 0;  // what an ideal ragged exchange of the same rows and pairs moves
  // Time that waiting threads had nothing else to do than to wait for this worker's replies.
  int64_t wait_ns = 0;
  int64_t worker_compute_ns = 0, worker_queue_ns = 0;  // as the worker's replies say
  uint64_t splits = 0;  // slices that were cut smaller than the policy because a slot was too small
};
struct CountersOf {
  uint32_t worker = 0, layer = 0;
  Counters counters;
};

// What may be done with a data path (path.h).
enum class PathState : uint8_t {
  kFresh,   // nothing has travelled yet
  kInUse,   // requests travel
  kWorn,    // calls wait until it is renewed: slots are missing, or a device step failed on it
  kLeased,  // a device step uses it; calls wait until it is given back
  kLost,    // its worker is gone
};
const char* path_state_name(PathState state);

struct WorkerReport {
  std::string name;
  PathState path = PathState::kFresh;
  std::string reason;  // why it was lost, or why its path is worn
  uint32_t quarantined_slots = 0;
  uint64_t stale_replies = 0;  // that arrived after their call had ended
  uint64_t generation = 0;
};

// A data path that was retired for its caller to renew: it is worn and nothing is in flight on it.
struct WornPath {
  uint32_t worker = 0;
  std::string reason;
};

// One recorded slice, for timelines. Times are CLOCK_MONOTONIC, those named worker_* of the
// worker's machine, all others of the host's.
struct SliceTrace {
  uint64_t call_id = 0;
  uint32_t layer = 0, shard = 0, worker = 0;
  uint16_t slice = 0;
  uint32_t num_rows = 0;
  int64_t begun_ns = 0;  // when the client began to cut the call
  int64_t encode_start_ns = 0, published_ns = 0, arrived_ns = 0, combined_ns = 0;
  int64_t worker_received_ns = 0, worker_started_ns = 0, worker_finished_ns = 0;
};

// A worker's data path while the host's device uses it in a device step, instead of the client.
struct LeasedPath {
  uint32_t worker = 0;
  std::string name;  // the worker's
  uint64_t generation = 0;
  transport::SlotGeometry geometry;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  transport::RingView ring;
};
struct StepLease {
  std::vector<LeasedPath> paths;  // one for each worker, ascending
  uint64_t first_call = 0;        // the ids of the step's calls begin here
};
// How far a leased path was used, in units of the ring's head words.
struct RingUse {
  uint32_t head = 0, tail = 0;
};
// One request of a step that was answered.
struct StepMessage {
  uint32_t worker = 0, layer = 0;
  uint32_t num_rows = 0, num_pairs = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;
};
struct StepResult {
  std::vector<RingUse> used;  // one for each leased path, in their order
  std::vector<StepMessage> answered;
  bool has_failed = true;  // then no path of the step is used again before it is renewed
};

}  // namespace dflash::client
