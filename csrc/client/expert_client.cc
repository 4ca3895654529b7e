// SPDX-License-Identifier: Apache-2.0
#include "client/expert_client.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "base/clock.h"
#include "base/convert.h"
#include "client/call.h"
#include "client/engine.h"
#include "wire/limits.h"

namespace dflash::client {
namespace {

Error argument_error(std::string message) { return Error{ErrorCode::kInvalidArgument, std::move(message)}; }

Status validate(const TokenBatch& batch, const LayerPlan& plan) {
  if (batch.num_tokens == 0) return ok();
  if (batch.top_k == 0 || batch.top_k > wire::kMaxPairsPerRow) {
    return argument_error("top_k is " + std::to_string(batch.top_k) + ", allowed are 1.." + std::to_string(wire::kMaxPairsPerRow));
  }
  if (batch.hidden_states == nullptr || batch.topk_ids == nullptr || batch.topk_weights == nullptr || batch.output == nullptr) {
    return argument_error("layer " + plan.name + ": a tensor has no memory");
  }
  return ok();
}

Status route(const TokenBatch& batch, Call& call) {
  const size_t num_pairs = size_t{batch.num_tokens} * batch.top_k;
  std::vector<float> widened;
  std::span<const float> weights;
  if (batch.weights_dtype == Dtype::kF32 && reinterpret_cast<uintptr_t>(batch.topk_weights) % alignof(float) == 0) {
    weights = {reinterpret_cast<const float*>(batch.topk_weights), num_pairs};
  } else {
    widened.resize(num_pairs);
    widen(batch.weights_dtype, batch.topk_weights, widened.data(), num_pairs);
    weights = widened;
  }
  const ExpertTable& experts = call.layer->experts;
  if (batch.ids_are_64bit) {
    return experts.exchange<int64_t>({static_cast<const int64_t*>(batch.topk_ids), num_pairs}, weights, batch.top_k, call.shard_rows);
  }
  return experts.exchange<int32_t>({static_cast<const int32_t*>(batch.topk_ids), num_pairs}, weights, batch.top_k, call.shard_rows);
}

}  // namespace

// The lock, who drives, and how another thread gets the driver out of its sleep.
struct ExpertClient::State {
  explicit State(const ClientOptions& options) : engine(options) {}

  Engine engine;
  mutable std::mutex mutex;              // guards engine and is_driven
  std::condition_variable driver_left;
  bool is_driven = false;
  std::atomic<bool> is_shared{false};    // more than one thread has met here: from then on the driver sleeps on `bell` too
  std::atomic<uint32_t> num_entering{0};
  OwnedFd bell{::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};

  // Takes the lock, waking a sleeping driver. (The driver sleeps with the lock held, so that channels have one user at a time.)
  std::unique_lock<std::mutex> enter() {
    std::unique_lock lock(mutex, std::try_to_lock);
    if (lock.owns_lock()) return lock;
    is_shared.store(true, std::memory_order_relaxed);
    num_entering.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t one = 1;
    if (::write(bell.get(), &one, sizeof one) < 0) {
      // A full eventfd is readable all the more.
    }
    lock.lock();
    num_entering.fetch_sub(1, std::memory_order_seq_cst);
    return lock;
  }
};

ExpertClient::ExpertClient(const ClientOptions& options) : state_(std::make_unique<State>(options)) {}
ExpertClient::~ExpertClient() = default;

Result<uint32_t> ExpertClient::add_worker(WorkerLink link) {
  if (link.channel == nullptr) return argument_error("worker " + link.name + " has no channel");
  if (link.policy.slice_tokens == 0 || link.policy.window == 0) return argument_error("slice_tokens and window must be at least 1");
  const auto lock = state_->enter();
  return state_->engine.add_worker(std::move(link));
}

Status ExpertClient::replace_channel(uint32_t worker, std::unique_ptr<transport::Channel> channel, uint64_t generation) {
  const auto lock = state_->enter();
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr || channel == nullptr) return argument_error("there is no worker " + std::to_string(worker));
  if (end->is_lost) return Error{ErrorCode::kWorkerLost, "worker " + end->link.name + " is lost: " + end->reason};
  if (end->owes() || !end->waiting.empty()) return argument_error("worker " + end->link.name + " still owes replies; drain first");
  end->replace_channel(std::move(channel), generation);
  return ok();
}

Status ExpertClient::set_policy(uint32_t worker, SlicePolicy policy) {
  const auto lock = state_->enter();
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr) return argument_error("there is no worker " + std::to_string(worker));
  if (policy.slice_tokens == 0 || policy.window == 0) return argument_error("slice_tokens and window must be at least 1");
  end->link.policy = policy;
  return ok();
}

Status ExpertClient::set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype) {
  const auto lock = state_->enter();
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr) return argument_error("there is no worker " + std::to_string(worker));
  end->link.request_dtype = request_dtype;
  end->link.reply_dtype = reply_dtype;
  return ok();
}

Status ExpertClient::define_layer(const LayerPlan& plan) {
  const auto lock = state_->enter();
  return state_->engine.define_layer(plan);
}

Result<CallPtr> ExpertClient::submit(const TokenBatch& batch, uint32_t layer) {
  const auto lock = state_->enter();
  Engine& engine = state_->engine;
  const Layer* found = engine.layer(layer);
  if (found == nullptr) return argument_error("layer " + std::to_string(layer) + " is not in the layer table");
  DFLASH_TRY(validate(batch, found->plan));
  auto call = std::make_shared<Call>();
  call->layer = found;
  call->batch = batch;
  call->shard_rows.resize(found->plan.shards.size());
  if (batch.num_tokens > 0) {
    Status routed = route(batch, *call);
    if (!routed.ok()) return std::move(routed).error().with("layer " + found->plan.name);
  }
  DFLASH_TRY(engine.start(call));
  return call;
}

bool ExpertClient::wait(const CallPtr& call, Deadline tick) {
  State& s = *state_;
  auto lock = s.enter();
  while (!call->is_done && !tick.has_passed()) {
    if (s.is_driven) {  // somebody else drives for all; they notify when they leave or finish calls
      s.is_shared.store(true, std::memory_order_relaxed);
      s.driver_left.wait_for(lock, std::chrono::nanoseconds(std::min<int64_t>(tick.left_ns(), kTickNs)));
      continue;
    }
    s.is_driven = true;
    const int wake_fd = s.is_shared.load(std::memory_order_relaxed) ? s.bell.get() : -1;
    s.engine.drive(tick, wake_fd);
    s.is_driven = false;
    if (wake_fd >= 0) {
      s.driver_left.notify_all();
      uint64_t rung = 0;
      while (::read(wake_fd, &rung, sizeof rung) > 0) {
      }
      if (s.num_entering.load(std::memory_order_seq_cst) > 0 && !call->is_done) {
        lock.unlock();
        std::this_thread::yield();  // mutexes are not fair: let the one that rang in
        lock.lock();
      }
    }
  }
  return call->is_done;
}

bool ExpertClient::is_done(const CallPtr& call) {
  const auto lock = state_->enter();
  return call->is_done;
}

Status ExpertClient::outcome(const CallPtr& call) {
  const auto lock = state_->enter();
  if (!call->is_done) return argument_error("the call is not done");
  if (call->error) return *call->error;
  return ok();
}

void ExpertClient::abandon(const CallPtr& call) {
  const auto lock = state_->enter();
  state_->engine.fail(*call, Error{ErrorCode::kClosed, "the call was abandoned"});
}

void ExpertClient::mark_lost(uint32_t worker, const std::string& reason) {
  const auto lock = state_->enter();
  if (WorkerEnd* end = state_->engine.worker(worker)) state_->engine.lose(*end, ErrorCode::kWorkerLost, reason);
}

std::vector<std::pair<std::pair<uint32_t, uint32_t>, Counters>> ExpertClient::counters() const {
  const auto lock = state_->enter();
  std::vector<std::pair<std::pair<uint32_t, uint32_t>, Counters>> all;
  for (uint32_t worker = 0; worker < state_->engine.num_workers(); ++worker) {
    for (const auto& [layer, counters] : state_->engine.worker(worker)->counters) all.push_back({{worker, layer}, counters});
  }
  return all;
}

std::vector<WorkerReport> ExpertClient::workers() const {
  const auto lock = state_->enter();
  std::vector<WorkerReport> reports;
  for (uint32_t worker = 0; worker < state_->engine.num_workers(); ++worker) {
    const WorkerEnd& end = *state_->engine.worker(worker);
    reports.push_back({end.link.name, end.is_lost ? WorkerState::kLost : WorkerState::kReady, end.reason, end.num_quarantined(),
                       end.stale_replies, end.link.generation});
  }
  return reports;
}

void ExpertClient::set_profile(bool on) {
  const auto lock = state_->enter();
  state_->engine.set_profile(on);
}

std::vector<SliceTrace> ExpertClient::take_traces() {
  const auto lock = state_->enter();
  return state_->engine.take_traces();
}

}  // namespace dflash::client
