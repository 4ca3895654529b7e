// SPDX-License-Identifier: Apache-2.0
#include "client/expert_client.h"

#include <cstring>

#include "base/clock.h"
#include "base/convert.h"
#include "client/call.h"
#include "client/engine.h"
#include "client/turn.h"
#include "wire/limits.h"

namespace dflash::client {
namespace {

Error argument_error(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message)};
}

Status validate(const TokenBatch& batch, const LayerPlan& plan) {
  if (batch.num_tokens == 0) return ok();
  if (batch.top_k == 0 || batch.top_k > wire::kMaxPairsPerRow) {
    return argument_error("top_k is " + std::to_string(batch.top_k) + ", allowed are 1.." +
                          std::to_string(wire::kMaxPairsPerRow));
  }
  if (batch.hidden_states == nullptr || batch.topk_ids == nullptr ||
      batch.topk_weights == nullptr || batch.output == nullptr) {
    return argument_error("layer " + plan.name + ": a tensor has no memory");
  }
  return ok();
}

// topk arrays as the exchange reads them; a copy only where dtype or alignment ask for one.
template <class T>
std::span<const T> aligned(const void* from, size_t count, std::vector<T>& copy) {
  if (reinterpret_cast<uintptr_t>(from) % alignof(T) == 0)
    return {static_cast<const T*>(from), count};
  copy.resize(count);
  std::memcpy(copy.data(), from, count * sizeof(T));
  return copy;
}

template <class Id>
Status route_ids(const TokenBatch& batch, std::span<const float> weights,
                 const ExpertTable& experts, std::span<ShardRows> rows) {
  std::vector<Id> copy;
  return experts.exchange<Id>(aligned(batch.topk_ids, weights.size(), copy), weights, batch.top_k,
                              rows);
}

Status route(const TokenBatch& batch, const ExpertTable& experts, std::span<ShardRows> rows) {
  const size_t num_pairs = size_t{batch.num_tokens} * batch.top_k;
  std::vector<float> copy;
  std::span<const float> weights;
  if (batch.weights_dtype == Dtype::kF32) {
    weights = aligned(static_cast<const void*>(batch.topk_weights), num_pairs, copy);
  } else {
    copy.resize(num_pairs);
    widen(batch.weights_dtype, batch.topk_weights, copy.data(), num_pairs);
    weights = copy;
  }
  return batch.ids_are_64bit ? route_ids<int64_t>(batch, weights, experts, rows)
                             : route_ids<int32_t>(batch, weights, experts, rows);
}

Status check_policy(SlicePolicy policy) {
  if (policy.slice_tokens >= 1 && policy.slice_tokens <= wire::kMaxRows && policy.window >= 1)
    return ok();
  return argument_error("slice_tokens is " + std::to_string(policy.slice_tokens) + " and window " +
                        std::to_string(policy.window) + "; allowed are 1.." +
                        std::to_string(wire::kMaxRows) + " and 1 or more");
}

}  // namespace

struct ExpertClient::State {
  explicit State(const ClientOptions& options) : engine(options) {}

  mutable TurnTable turns;
  Engine engine;  // whoever has the turn
};

ExpertClient::ExpertClient(const ClientOptions& options)
    : state_(std::make_unique<State>(options)) {}
ExpertClient::~ExpertClient() = default;

Result<uint32_t> ExpertClient::add_worker(WorkerLink link) {
  if (link.channel == nullptr) return argument_error("worker " + link.name + " has no channel");
  DFLASH_TRY(check_policy(link.policy));
  const Turn turn(state_->turns);
  return state_->engine.add_worker(std::move(link));
}

Status ExpertClient::replace_channel(uint32_t worker, std::unique_ptr<transport::Channel> channel,
                                     uint64_t generation) {
  const Turn turn(state_->turns);
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr || channel == nullptr)
    return argument_error("there is no worker " + std::to_string(worker));
  if (end->is_lost)
    return Error{ErrorCode::kWorkerLost, "worker " + end->link.name + " is lost: " + end->reason};
  if (end->owes() || !end->waiting.empty())
    return argument_error("worker " + end->link.name + " still owes replies; drain first");
  end->replace_channel(std::move(channel), generation);
  return ok();
}

Status ExpertClient::set_policy(uint32_t worker, SlicePolicy policy) {
  DFLASH_TRY(check_policy(policy));
  const Turn turn(state_->turns);
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr) return argument_error("there is no worker " + std::to_string(worker));
  end->link.policy = policy;
  end->model.forget_records();
  return ok();
}

Status ExpertClient::set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype) {
  const Turn turn(state_->turns);
  WorkerEnd* end = state_->engine.worker(worker);
  if (end == nullptr) return argument_error("there is no worker " + std::to_string(worker));
  end->link.request_dtype = request_dtype;
  end->link.reply_dtype = reply_dtype;
  return ok();
}

Status ExpertClient::define_layer(const LayerPlan& plan) {
  const Turn turn(state_->turns);
  return state_->engine.define_layer(plan);
}

Result<CallPtr> ExpertClient::submit(const TokenBatch& batch, uint32_t layer) {
  const Turn turn(state_->turns);
  Engine& engine = state_->engine;
  const Layer* found = engine.layer(layer);
  if (found == nullptr)
    return argument_error("layer " + std::to_string(layer) + " is not in the layer table");
  DFLASH_TRY(validate(batch, found->plan));
  auto call = std::make_shared<Call>();
  call->layer = found;
  call->work = engine.take_work();
  call->work->batch = batch;
  call->work->shard_rows.resize(found->plan.shards.size());
  Status routed = route(batch, found->experts, call->work->shard_rows);
  if (!routed.ok()) return std::move(routed).error().with("layer " + found->plan.name);
  DFLASH_TRY(engine.start(call));
  return call;
}

bool ExpertClient::wait(const CallPtr& call, Deadline tick) {
  TurnTable& turns = state_->turns;
  Engine& engine = state_->engine;
  const auto is_over = [&] {
    return call->is_done.load(std::memory_order_acquire) || tick.has_passed();
  };
  while (!is_over()) {
    if (!turns.acquire_to_drive(tick)) continue;
    const uint64_t num_ended = engine.num_ended();
    // The turn goes back whenever any call ended, because its waiter sleeps until then.
    while (!is_over() && engine.num_ended() == num_ended && !turns.is_wanted())
      engine.drive(tick, turns.wake_fd());
    turns.release();
  }
  return call->is_done.load(std::memory_order_acquire);
}

bool ExpertClient::is_done(const CallPtr& call) {
  if (call->is_done.load(std::memory_order_acquire) || !state_->turns.try_acquire())
    return call->is_done.load(std::memory_order_acquire);
  // a caller that only asks, and never waits, must see its call end
  state_->engine.drive(Deadline::at_ns(0), -1);
  state_->turns.release();
  return call->is_done.load(std::memory_order_acquire);
}

Status ExpertClient::outcome(const CallPtr& call) {
  if (!call->is_done.load(std::memory_order_acquire)) return argument_error("the call is not done");
  if (call->error) return *call->error;
  return ok();
}

void ExpertClient::abandon(const CallPtr& call) {
  const Turn turn(state_->turns);
  state_->engine.fail(*call, Error{ErrorCode::kClosed, "the call was abandoned"});
}

Result<std::vector<StepLane>> ExpertClient::begin_step(uint32_t num_calls, uint64_t* first_call) {
  const Turn turn(state_->turns);
  return state_->engine.begin_step(num_calls, first_call);
}

Status ExpertClient::judge_step() {
  const Turn turn(state_->turns);
  return state_->engine.judge_step(now_ns());
}

void ExpertClient::end_step(std::span<const std::pair<uint32_t, uint32_t>> heads_and_tails,
                            std::span<const StepMessage> answered, bool has_failed) {
  const Turn turn(state_->turns);
  state_->engine.end_step(heads_and_tails, answered, has_failed);
}

void ExpertClient::mark_lost(uint32_t worker, const std::string& reason) {
  const Turn turn(state_->turns);
  if (WorkerEnd* end = state_->engine.worker(worker)) state_->engine.lose_after_drain(*end, reason);
}

std::vector<std::pair<std::pair<uint32_t, uint32_t>, Counters>> ExpertClient::counters() const {
  const Turn turn(state_->turns);
  std::vector<std::pair<std::pair<uint32_t, uint32_t>, Counters>> all;
  for (uint32_t worker = 0; worker < state_->engine.num_workers(); ++worker) {
    for (const auto& [layer, counters] : state_->engine.worker(worker)->counters)
      all.push_back({
          {worker, layer},
          counters
      });
  }
  return all;
}

std::vector<WorkerReport> ExpertClient::workers() const {
  const Turn turn(state_->turns);
  std::vector<WorkerReport> reports;
  for (uint32_t worker = 0; worker < state_->engine.num_workers(); ++worker) {
    const WorkerEnd& end = *state_->engine.worker(worker);
    reports.push_back({end.link.name, end.is_lost ? WorkerState::kLost : WorkerState::kReady,
                       end.reason, end.num_quarantined(), end.stale_replies, end.link.generation});
  }
  return reports;
}

std::vector<WorkerForecast> ExpertClient::forecasts() const {
  const Turn turn(state_->turns);
  std::vector<WorkerForecast> all;
  for (uint32_t worker = 0; worker < state_->engine.num_workers(); ++worker) {
    const WorkerEnd& end = *state_->engine.worker(worker);
    WorkerForecast& one = all.emplace_back();
    one.name = end.link.name;
    one.send = end.model.send().coefficients();
    one.receive = end.model.receive().coefficients();
    one.send_residual = end.model.send().residual();
    one.receive_residual = end.model.receive().residual();
    for (const auto& [cost_class, curve] : end.model.compute()) {
      one.compute[cost_class] = curve.coefficients();
      one.compute_residual[cost_class] = curve.residual();
    }
    one.chunks = end.model.records();
    one.clock_offset_ns = end.model.clock_offset_ns();
  }
  return all;
}

void ExpertClient::set_profile(bool on) {
  const Turn turn(state_->turns);
  state_->engine.set_profile(on);
}

std::vector<SliceTrace> ExpertClient::take_traces() {
  const Turn turn(state_->turns);
  return state_->engine.take_traces();
}

}  // namespace dflash::client
