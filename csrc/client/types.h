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
#include "transport/ring_lender.h"

namespace dflash::client {

// How many calls a client takes before it refuses more. A host has a few under way at a time, so
// that only a caller who never takes results meets the bound, long before memory ends.
inline constexpr uint32_t kMaxCalls = 1024;

// The settings of a client; times are in nanoseconds. Defaults of settings are those of the host's
// topology (dflash_moe/config/settings.py), so that both timeouts have to be given.
struct ClientOptions {
  ClientOptions(int64_t call_timeout, int64_t stall_timeout)
      : call_timeout_ns(call_timeout), stall_timeout_ns(stall_timeout) {}

  int64_t spin_ns = 0;  // for which a wait for replies spins before it sleeps; 0 if cores are short
  // The time of a call from submit(), and the time in which a worker that owes answers must give
  // one: without, it is suspected, and lost after twice that. Where the workers' models predict
  // more, both get more (engine.h). Time in which nobody looks at what arrives does not count
  // (liveness.h).
  int64_t call_timeout_ns;
  // A worker whose progress counter stands still for so long while it owes replies is lost.
  int64_t stall_timeout_ns;
  uint32_t max_calls = kMaxCalls;  // calls submitted and not yet done; one more is refused
  // A worker whose progress counter stands still for so long while it owes replies is suspected:
  // what it owes is asked of another holder too. Suspicion costs work, loss costs a worker, so that
  // this is much shorter than the stall timeout.
  int64_t suspect_ns = 300'000'000;
  // A slice whose shard has no usable holder waits so long for one that is on its way back.
  int64_t park_ns = 2'000'000'000;
  // With a holder on its way back, a slice waits so long before the last resort gets it, and no
  // longer than `park_ns`.
  int64_t reconnect_grace_ns = 50'000'000;
  // Second requests for slices that are merely slow, per slice that arrives; 0 sends none.
  double hedge_share = 0.05;
};

// How calls are cut for one worker. A mode is nothing more than this. One that was not filled in is
// refused.
struct SlicePolicy {
  uint32_t slice_tokens = 0;  // a call is cut evenly into ceil(T / slice_tokens) token ranges
  uint32_t window = 0;        // the most slices in flight at the worker
  // Whether both are upper bounds, and every chunk is cut as the worker's model predicts to be
  // best.
  bool is_measured = false;
};

// The host's end of a new data path.
struct NewPath {
  std::unique_ptr<transport::Channel> channel;
  uint64_t generation = 0;  // under which the worker serves this channel; never one used before
};

// A worker as it is added: its path and pulse are handed over with it.
struct NewWorker {
  std::string name;
  NewPath path;
  // Where the worker's pulses arrive (wire/frame.h). A worker in this process has none.
  OwnedFd pulse;
  SlicePolicy policy;
  Dtype request_dtype = Dtype::kF32;
  Dtype reply_dtype = Dtype::kF32;
  // Whether it is asked only where no other holder can be: the host's own copy of the weights,
  // which costs no memory and is slow.
  bool is_last_resort = false;
};

// Whether new slices may go to a worker. One that drains finishes what it has, and is asked for
// more only where nobody else holds a shard.
enum class Admission : uint8_t { kOpen, kDraining };

// One shard of a layer, and where it is placed.
struct ShardPlace {
  uint32_t shard = 0;  // its id; the shards of a layer are added in ascending id
  // Its first holder, by the index that add_worker returned; set_holders() names others.
  uint32_t worker = 0;
  uint64_t weights_fingerprint = 0;
  std::vector<uint32_t> experts;  // global ids, ascending; an expert's local id is its position
};

// A layer as the client is told of it.
struct LayerPlan {
  uint32_t layer = 0;  // index in the layer table
  std::string name;
  uint32_t in_size = 0, out_size = 0, num_experts = 0;
  std::vector<ShardPlace> shards;  // every expert is in exactly one of them
  // Layers of equal class have experts of equal shape and format, and share a cost curve.
  uint32_t cost_class = 0;
};

// Counts for one worker and layer since the start.
struct Counters {
  uint64_t calls = 0, rows = 0, pairs = 0;  // `calls` counts the requests that were sent
  uint64_t request_bytes = 0, reply_bytes = 0;
  uint64_t floor_bytes = 0;  // what an ideal ragged exchange of the same rows and pairs would move
  // How long threads had nothing else to do than to wait for this worker's replies.
  int64_t wait_ns = 0;
  int64_t worker_compute_ns = 0, worker_queue_ns = 0;  // as the worker's replies say
  uint64_t splits = 0;  // slices cut smaller than the policy says, because a slot was too small
  // -- remedies (router.h); all 0 in a run without faults and with one holder per shard --
  // Slices taken from this worker, because it was lost, refused them, or used up a call's time.
  uint64_t failovers = 0;
  uint64_t hedges = 0;      // requests sent here beside another holder's; not part of `calls`,
  uint64_t hedges_won = 0;  // `rows` and the other bytes; how often this one answered first
  uint64_t hedge_request_bytes = 0, hedge_reply_bytes = 0;
  uint64_t superseded = 0;  // replies that came after another holder's
  int64_t parked_ns = 0;    // how long slices taken from this worker waited for a holder
};
struct CountersOf {
  uint32_t worker = 0, layer = 0;
  Counters counters;
};

// What may be done with a data path (path.h).
enum class PathState : uint8_t {
  kFresh,   // nothing has travelled on it yet
  kInUse,   // requests travel on it
  kWorn,    // slots are missing, or a device step failed on it; calls wait until it is renewed
  kLeased,  // a device step uses it; calls wait until it is given back
  kLost,    // its worker is gone, until it is replaced
};
const char* path_state_name(PathState state);

// How a worker stands, from the best to the worst.
enum class Standing : uint8_t {
  kWell,
  kLate,  // it has owed an answer for longer than was predicted; others are preferred
  // It owes answers and shows no progress, or gives none: what it owes is asked of others too.
  kSuspect,
  kLost,  // it was given up, until it is replaced
};

// How a worker and its path stand.
struct WorkerReport {
  std::string name;
  PathState path = PathState::kFresh;
  Standing standing = Standing::kWell;
  Admission admission = Admission::kOpen;
  std::string reason;  // why the worker was lost or is suspected, or why its path is worn
  uint32_t quarantined_slots = 0;
  uint64_t stale_replies = 0;  // replies that arrived after their call had ended
  uint64_t generation = 0;
};

// What a client tells whoever supervises its workers, in the order in which it happened.
enum class EventKind : uint8_t {
  kSuspect,  // the worker owes replies, and shows no progress or answers nothing
  kWell,     // a suspected one shows progress again, or has answered
  kLost,     // it was given up, until replace_worker()
  kIdle,     // it drains and owes nothing any more
};
struct ClientEvent {
  uint32_t worker = 0;
  EventKind kind = EventKind::kLost;
  std::string reason;
};
// Events that nobody takes are kept up to this number, and the oldest are dropped then: a worker's
// report says what holds in the end.
inline constexpr size_t kMaxEvents = 4096;

// A data path that was retired so that the caller renews it. It is worn and has nothing in flight.
struct WornPath {
  uint32_t worker = 0;
  std::string reason;
};

// One recorded slice, for timelines. Times are CLOCK_MONOTONIC in nanoseconds: those named worker_*
// are of the worker's machine, all others of the host's.
struct SliceTrace {
  uint64_t call_id = 0;
  uint32_t layer = 0, shard = 0, worker = 0;
  uint16_t slice = 0;
  uint32_t num_rows = 0;
  int64_t begun_ns = 0;  // when the client began to cut the call
  int64_t encode_start_ns = 0, published_ns = 0, arrived_ns = 0, combined_ns = 0;
  int64_t worker_received_ns = 0, worker_started_ns = 0, worker_finished_ns = 0;
};

// A worker's data path while the host's device, instead of the client, uses it in a device step.
struct LeasedPath {
  uint32_t worker = 0;
  std::string name;  // the worker's name
  uint64_t generation = 0;
  transport::SlotGeometry geometry;
  Dtype request_dtype = Dtype::kF32, reply_dtype = Dtype::kF32;
  transport::RingView ring;
  // Whose end tells that the worker's process is gone; -1 where there is none. It is the client's,
  // which may close it during the step.
  int hangup_fd = -1;
};
// Who answers a device step for the shards of a layer.
struct StepHolders {
  uint32_t layer = 0;
  std::vector<uint32_t> paths;  // [num_shards], in the order of the plan: a place in the lease
  friend bool operator==(const StepHolders&, const StepHolders&) = default;
};
// The data paths that a device step has been lent.
struct StepLease {
  std::vector<LeasedPath> paths;     // one for each worker that is asked, in ascending index
  uint64_t first_call = 0;           // the first of the ids of the step's calls
  std::vector<StepHolders> holders;  // of every layer, in ascending index
  uint64_t holders_id = 0;           // leases with equal ids have equal `holders`
};
// How far a leased path was used, in units of the ring's head words.
struct RingUse {
  uint32_t head = 0, tail = 0;
};
// One request of a step that has been answered.
struct StepMessage {
  uint32_t worker = 0, layer = 0;
  uint32_t num_rows = 0, num_pairs = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;
};
// What a device step gives back with the paths.
struct StepResult {
  std::vector<RingUse> used;  // one for each leased path, in their order
  std::vector<StepMessage> answered;
  bool has_failed = true;  // if so, no path of the step is used again before it is renewed
};

}  // namespace dflash::client
