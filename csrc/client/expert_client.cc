// The client's facade: it validates and routes calls, takes the turn, and lets the engine do the
// rest.
// SPDX-License-Identifier: Apache-2.0
#include "client/expert_client.h"

#include <cstring>
#include <type_traits>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
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

// Returns a top-k array as the exchange reads it. It is copied only where its alignment asks for
// it.
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
    const CanonicalFloatMode mode;  // some processors widen f16 as that mode says
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
  // The engine for one short turn. At its end the keepers are told: it may have worn out a path,
  // ended the last call on a worn one, or changed how a worker stands.
  class Inside {
   public:
    explicit Inside(State& state) : state_(state), turn_(state.turns) {}
    ~Inside() { state_.tell_keepers(); }
    Engine* operator->() { return &state_.engine; }

   private:
    State& state_;
    const Turn turn_;
  };

  explicit State(const ClientOptions& options) : engine(options) {}

  // Calls `use` with a worker's link in one short turn. Returns what it returns, which is a Status
  // where that is nothing. Errors: kInvalidArgument where there is no such worker.
  template <class Use>
  auto with_link(uint32_t worker, Use use) {
    using Returned = std::invoke_result_t<Use, Link&>;
    using Answer = std::conditional_t<std::is_void_v<Returned>, Status, Returned>;
    const Inside inside(*this);
    Link* link = engine.link(worker);
    if (link == nullptr)
      return Answer(argument_error("there is no worker " + std::to_string(worker)));
    if constexpr (std::is_void_v<Returned>) {
      use(*link);
      return Answer(ok());
    } else {
      return use(*link);
    }
  }
  // Called with the turn. Drives until `is_met` holds. Returns false if `until` has passed or
  // somebody wants the turn.
  template <class Condition>
  bool drive(Deadline until, Condition is_met) {
    while (!is_met()) {
      if (until.has_passed() || turns.is_wanted()) return false;
      engine.drive(until, turns.wake_fd());
      tell_keepers();
    }
    return true;
  }
  // Called without the turn. Drives until the condition holds, or `until` passes.
  template <class Condition>
  bool drive_until(Deadline until, Condition is_met) {
    while (!until.has_passed()) {
      if (!turns.acquire_to_drive(until)) continue;
      const Turn turn(turns, std::adopt_lock);
      if (drive(until, is_met)) return true;
    }
    return false;
  }
  // Called with the turn.
  void tell_keepers() {
    if (engine.has_path_to_retire()) worn_bell.ring();
    if (!engine.events().empty()) event_bell.ring();
  }

  TurnTable turns;
  Engine engine;  // used by whoever has the turn
  Bell worn_bell, event_bell;
};

ExpertClient::ExpertClient(const ClientOptions& options)
    : state_(std::make_unique<State>(options)) {}
ExpertClient::~ExpertClient() = default;

// -- workers and layers --

Result<uint32_t> ExpertClient::add_worker(NewWorker worker) {
  if (worker.path.channel == nullptr)
    return argument_error("worker " + worker.name + " has no channel");
  DFLASH_TRY(check_policy(worker.policy));
  return State::Inside(*state_)->add_worker(std::move(worker));
}

Status ExpertClient::define_layer(const LayerPlan& plan) {
  return State::Inside(*state_)->define_layer(plan);
}

Status ExpertClient::set_policy(uint32_t worker, SlicePolicy policy) {
  DFLASH_TRY(check_policy(policy));
  return state_->with_link(worker, [&](Link& link) {
    link.policy = policy;
    link.model.forget_records();
  });
}

Status ExpertClient::set_dtypes(uint32_t worker, Dtype request_dtype, Dtype reply_dtype) {
  return state_->with_link(worker, [&](Link& link) {
    link.request_dtype = request_dtype;
    link.reply_dtype = reply_dtype;
  });
}

Status ExpertClient::set_holders(uint32_t layer, uint32_t shard,
                                 const std::vector<uint32_t>& workers) {
  return State::Inside(*state_)->set_holders(layer, shard, workers);
}

Status ExpertClient::set_admission(uint32_t worker, Admission admission) {
  return state_->with_link(worker,
                           [&](Link& link) { state_->engine.set_admission(link, admission); });
}

Status ExpertClient::set_remedy(uint32_t worker, bool has_remedy) {
  return state_->with_link(worker,
                           [&](Link& link) { state_->engine.set_remedy(link, has_remedy); });
}

Status ExpertClient::set_stand_in(uint32_t worker, bool may_come) {
  return state_->with_link(worker, [&](Link& link) { link.may_have_stand_in = may_come; });
}

void ExpertClient::mark_lost(uint32_t worker, const std::string& reason) {
  static_cast<void>(state_->with_link(
      worker, [&](Link& link) { state_->engine.lose_after_drain(link, reason); }));
}

// -- calls --

Result<CallPtr> ExpertClient::submit(const TokenBatch& batch, uint32_t layer) {
  const OperatorScope scope(Operator::kExpertCall);
  State::Inside engine(*state_);
  const Layer* found = engine->layers().find(layer);
  if (found == nullptr)
    return argument_error("layer " + std::to_string(layer) + " is not in the layer table");
  const ErrorPlace here{{}, layer, {}, {}};
  if (Status valid = validate(batch, found->plan); !valid.ok())
    return std::move(valid).error().at(here);
  auto call = std::make_shared<Call>();
  call->layer = found;
  call->work = engine->calls().take_work();
  call->work->batch = batch;
  call->work->shard_rows.resize(found->plan.shards.size());
  Status routed = route(batch, found->experts, call->work->shard_rows);
  if (!routed.ok()) return std::move(routed).error().with("layer " + found->plan.name).at(here);
  DFLASH_TRY(engine->start(call));
  return call;
}

bool ExpertClient::wait(const CallPtr& call, Deadline tick) {
  const OperatorScope scope(Operator::kExpertCall);
  const auto is_done = [&] { return call->is_done.load(std::memory_order_acquire); };
  State& state = *state_;
  while (!is_done() && !tick.has_passed()) {
    if (!state.turns.acquire_to_drive(tick)) continue;
    const Turn turn(state.turns, std::adopt_lock);
    // The turn goes back whenever any call has ended, because its waiter sleeps until then.
    const uint64_t num_ended = state.engine.calls().num_ended();
    state.drive(tick, [&] { return is_done() || state.engine.calls().num_ended() != num_ended; });
  }
  return this->is_done(
      call);  // also for a caller who asks again and again without any time to wait
}

bool ExpertClient::is_done(const CallPtr& call) {
  if (!call->is_done.load(std::memory_order_acquire) && state_->turns.try_acquire()) {
    const Turn turn(state_->turns, std::adopt_lock);
    // A caller that only asks and never waits can thus see its call end.
    state_->engine.drive(Deadline::at_ns(0), -1);
    state_->tell_keepers();
  }
  return call->is_done.load(std::memory_order_acquire);
}

Status ExpertClient::outcome(const CallPtr& call) {
  if (!call->is_done.load(std::memory_order_acquire)) return argument_error("the call is not done");
  if (call->error) return *call->error;
  return ok();
}

void ExpertClient::abandon(const CallPtr& call) {
  State::Inside(*state_)->calls().fail(*call, Error{ErrorCode::kClosed, "the call was abandoned"});
}

// -- between calls --

bool ExpertClient::hold(Deadline tick) {
  Calls& calls = state_->engine.calls();
  return state_->drive_until(tick, [&calls] {
    if (calls.is_held() && !calls.is_closed()) return false;
    calls.hold();
    return true;
  });
}

bool ExpertClient::wait_until_quiet(Deadline tick) {
  return state_->drive_until(tick, [this] {
    state_->tell_keepers();
    const Calls& calls = state_->engine.calls();
    return calls.is_closed() || calls.num_under_way() == 0;
  });
}

bool ExpertClient::wait_until_fit(Deadline tick) {
  return state_->drive_until(tick, [this] {
    state_->engine.wear_out_unfit();
    state_->tell_keepers();
    return state_->engine.calls().is_closed() || !state_->engine.must_step_wait();
  });
}

void ExpertClient::resume() { State::Inside(*state_)->resume(); }

void ExpertClient::close() { State::Inside(*state_)->calls().close(); }

// -- data paths and events --

int ExpertClient::event_fd() const { return state_->event_bell.fd(); }

std::vector<ClientEvent> ExpertClient::take_events() {
  const Turn turn(state_->turns);
  state_->event_bell.quieten();
  return state_->engine.events().take();
}

int ExpertClient::worn_fd() const { return state_->worn_bell.fd(); }

void ExpertClient::wake_renewer() {
  const Turn turn(state_->turns);
  state_->worn_bell.ring();
}

std::vector<WornPath> ExpertClient::retire_worn_paths() {
  const Turn turn(state_->turns);
  state_->worn_bell.quieten();
  return state_->engine.retire_worn_paths();
}

Result<int64_t> ExpertClient::pulse_age_ns(uint32_t worker) {
  return state_->with_link(
      worker, [&](Link& link) -> Result<int64_t> { return state_->engine.pulse_age_ns(link); });
}

Status ExpertClient::retire_path(uint32_t worker, const std::string& reason) {
  return state_->with_link(worker,
                           [&](Link& link) { return state_->engine.retire_path(link, reason); });
}

Status ExpertClient::renew_path(uint32_t worker, NewPath path) {
  return state_->with_link(worker, [&](Link& link) -> Status {
    if (path.channel == nullptr) return argument_error("a data path needs a channel");
    return state_->engine.renew_path(link, std::move(path));
  });
}

Status ExpertClient::replace_worker(uint32_t worker, NewPath path, OwnedFd pulse) {
  return state_->with_link(worker, [&](Link& link) -> Status {
    if (path.channel == nullptr) return argument_error("a data path needs a channel");
    return state_->engine.replace_worker(link, std::move(path), std::move(pulse));
  });
}

// -- device steps --

Result<StepLease> ExpertClient::begin_step(uint32_t num_calls) {
  return State::Inside(*state_)->begin_step(num_calls);
}

Status ExpertClient::judge_step() { return State::Inside(*state_)->judge_step(); }

void ExpertClient::end_step(const StepResult& result) { State::Inside(*state_)->end_step(result); }

// -- what is known --

std::vector<CountersOf> ExpertClient::counters() const {
  const Turn turn(state_->turns);
  std::vector<CountersOf> all;
  for (const auto& link : state_->engine.links()) {
    for (const auto& [layer, counters] : link->counters)
      all.push_back({link->index, layer, counters});
  }
  return all;
}

std::vector<WorkerReport> ExpertClient::workers() const {
  const Turn turn(state_->turns);
  std::vector<WorkerReport> reports;
  for (const auto& link : state_->engine.links()) {
    reports.push_back({link->name, link->path.state(), link->standing(), link->admission,
                       link->reason(), link->path.num_quarantined(), link->stale_replies,
                       link->path.generation()});
  }
  return reports;
}

std::vector<WorkerForecast> ExpertClient::forecasts() const {
  const Turn turn(state_->turns);
  std::vector<WorkerForecast> all;
  for (const auto& link : state_->engine.links()) all.push_back(link->model.report(link->name));
  return all;
}

void ExpertClient::set_spinning(bool is_allowed) {
  State::Inside(*state_)->set_spinning(is_allowed);
}

void ExpertClient::set_profile(bool on) { State::Inside(*state_)->calls().set_profile(on); }

std::vector<SliceTrace> ExpertClient::take_traces() {
  return State::Inside(*state_)->calls().take_traces();
}

}  // namespace dflash::client
