// The engine's calls and sending: how a call is admitted, cut, sent by the credits of its paths,
// and ended.
// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"

#include <algorithm>

#include "client/encode.h"
#include "wire/limits.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr size_t kMaxSpareWorks = 16;             // as many calls are under way in practice
constexpr size_t kMaxSpareListTokens = 64 << 10;  // larger lists are freed instead of kept

Error plan_error(const LayerPlan& plan, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument, "layer " + plan.name + ": " + what}.at(
      {{}, plan.layer, {}, {}});
}

Error closed_error() {
  return Error{ErrorCode::kClosed,
               "the runtime was closed before this call was done; take results before close()"};
}

Status check_plan(const LayerPlan& plan, size_t num_workers) {
  const auto is_width = [](uint32_t width) { return width >= 1 && width <= wire::kMaxRowWidth; };
  if (plan.layer >= wire::kMaxLayers)
    return plan_error(plan, "its index " + std::to_string(plan.layer) + " is above 4095");
  if (!is_width(plan.in_size) || !is_width(plan.out_size))
    return plan_error(plan, "row widths must be 1..65536");
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const std::string shard = "shard " + std::to_string(plan.shards[s].shard);
    if (plan.shards[s].worker >= num_workers)
      return plan_error(plan, shard + " is placed on a worker that was not added");
    if (s > 0 && plan.shards[s].shard == plan.shards[s - 1].shard)
      return plan_error(plan, shard + " is listed twice");
  }
  return ok();
}

}  // namespace

uint32_t Engine::add_worker(NewWorker worker) {
  const auto index = static_cast<uint32_t>(links_.size());
  links_.push_back(std::make_unique<Link>(std::move(worker), index, events_));
  wait_entries_.resize(links_.size());
  return index;
}

Status Engine::define_layer(const LayerPlan& plan) {
  if (layers_.contains(plan.layer))
    return plan_error(plan, "index " + std::to_string(plan.layer) + " is already defined");
  LayerPlan sorted = plan;
  std::sort(sorted.shards.begin(), sorted.shards.end(),
            [](const auto& a, const auto& b) { return a.shard < b.shard; });
  DFLASH_TRY(check_plan(sorted, links_.size()));
  std::vector<std::vector<uint32_t>> experts;
  for (const ShardPlace& shard : sorted.shards) experts.push_back(shard.experts);
  auto table = ExpertTable::build(plan.num_experts, experts);
  if (!table.ok()) return std::move(table).error().with("layer " + plan.name);
  std::vector<std::vector<uint32_t>> holders;
  for (const ShardPlace& shard : sorted.shards) holders.push_back({shard.worker});
  layers_.emplace(plan.layer,
                  Layer{std::move(sorted), std::move(table).value(), std::move(holders)});
  return ok();
}

Status Engine::check_holders(const LayerPlan& plan, const ShardPlace& shard,
                             std::span<const uint32_t> workers) const {
  const auto refuse = [&](const std::string& what) {
    return plan_error(plan, "shard " + std::to_string(shard.shard) + ": " + what);
  };
  if (workers.empty()) return refuse("it needs one holder at least");
  for (size_t i = 0; i < workers.size(); ++i) {
    if (workers[i] >= links_.size())
      return refuse("there is no worker " + std::to_string(workers[i]));
    const Link &first = *links_[workers[0]], &one = *links_[workers[i]];
    if (std::find(workers.begin(), workers.begin() + static_cast<std::ptrdiff_t>(i), workers[i]) !=
        workers.begin() + static_cast<std::ptrdiff_t>(i))
      return refuse("worker " + one.name + " is named twice");
    // Rows are rounded to the wire dtypes, so that holders with others would give other bits.
    if (one.request_dtype != first.request_dtype || one.reply_dtype != first.reply_dtype) {
      return refuse("its holders disagree in wire dtypes: worker " + first.name + " has " +
                    dtype_name(first.request_dtype) + " and " + dtype_name(first.reply_dtype) +
                    ", worker " + one.name + " " + dtype_name(one.request_dtype) + " and " +
                    dtype_name(one.reply_dtype));
    }
  }
  return ok();
}

Status Engine::set_holders(uint32_t layer, uint32_t shard, const std::vector<uint32_t>& workers) {
  const auto found = layers_.find(layer);
  if (found == layers_.end())
    return Error{ErrorCode::kInvalidArgument,
                 "layer " + std::to_string(layer) + " is not in the layer table"};
  const LayerPlan& plan = found->second.plan;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    if (plan.shards[s].shard != shard) continue;
    DFLASH_TRY(check_holders(plan, plan.shards[s], workers));
    found->second.holders[s] = workers;
    has_replicas_ = has_replicas_ || workers.size() > 1;
    for (const auto& link : links_) move_waiting(*link, now());
    rehome_all(now());
    admit_parked();
    pump();
    return ok();
  }
  return plan_error(plan, "there is no shard " + std::to_string(shard));
}

const Layer* Engine::layer(uint32_t index) const {
  const auto found = layers_.find(index);
  return found == layers_.end() ? nullptr : &found->second;
}

std::unique_ptr<CallWork> Engine::take_work() {
  if (spare_works_.empty()) return std::make_unique<CallWork>();
  auto work = std::move(spare_works_.back());
  spare_works_.pop_back();
  return work;
}

// Returns how those shards stand for which the call has rows: the worst of them.
Engine::WorstShard Engine::worst_shard(const Call& call, int64_t now) const {
  WorstShard worst;
  for (size_t s = 0; s < call.layer->holders.size(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    const Outlook outlook =
        outlook_of(call.layer->holders[s], links_, now, options_.reconnect_grace_ns);
    if (outlook > worst.outlook) worst = {outlook, s};
  }
  return worst;
}

Status Engine::start(const CallPtr& call) {
  if (is_closed_) return closed_error();
  const int64_t real_now = now_ns();
  judge_if_due(real_now);
  const int64_t now = clock_.at(real_now);
  const WorstShard worst = worst_shard(*call, now);
  if (worst.outlook == Outlook::kGone)
    return lost_shard_error(*call->layer, call->layer->holders[worst.index], links_);
  if (calls_.size() >= options_.max_calls) {
    return Error{ErrorCode::kInvalidArgument,
                 std::to_string(calls_.size()) + " calls are already submitted, the bound is " +
                     std::to_string(options_.max_calls) + "; take results before submitting more"};
  }
  call->id = next_call_id_++;
  call->submitted_ns = real_now;
  call->asked_ns = now;
  call->deadline_ns = now + options_.call_timeout_ns;
  if (is_held_ || worst.outlook != Outlook::kUsable) {
    call->is_parked = true;
    ++num_parked_;
    calls_.push_back(call);
    return ok();
  }
  call->begun_ns = real_now;
  DFLASH_TRY(cutter_.cut(*call, links_));
  calls_.push_back(call);
  enqueue(*call);
  pump();
  return ok();
}

// Cuts every parked call whose shards have become usable, in the order of submission, and ends
// those that have waited in vain.
void Engine::admit_parked() {
  if (num_parked_ == 0) return;
  const int64_t real_now = now_ns(), now = clock_.at(real_now);
  const std::vector<CallPtr> calls = calls_;  // a copy: calls that end leave calls_
  for (const CallPtr& call : calls) {
    if (!call->is_parked) continue;
    const WorstShard worst = worst_shard(*call, now);
    const bool has_waited = now - call->asked_ns > options_.park_ns;
    if (worst.outlook == Outlook::kGone || (worst.outlook == Outlook::kComingBack && has_waited)) {
      fail(*call, lost_shard_error(*call->layer, call->layer->holders[worst.index], links_));
      continue;
    }
    if (is_held_ || worst.outlook != Outlook::kUsable) continue;
    call->is_parked = false;
    --num_parked_;
    call->begun_ns = real_now;
    Status done = cutter_.cut(*call, links_);
    if (done.ok()) {
      enqueue(*call);
    } else {
      fail(*call, std::move(done).error());
    }
  }
}

// Hands the slices of a cut call to their links, and extends its deadline where they are predicted
// to take long. A call without rows is done at once.
void Engine::enqueue(Call& call) {
  if (call.work->slices.empty()) return finish(call);
  for (ChunkForecast& forecast : call.work->forecasts) {
    if (forecast.slices_left == 0) continue;
    Link& link = *links_[forecast.worker];
    forecast.is_alone = link.num_chunks == 0;
    if (link.num_chunks++ > 0) link.crowded_ns = call.begun_ns;
  }
  int64_t longest_ns = 0;
  for (Slice& slice : call.work->slices) {
    Link& link = *links_[slice.worker];
    link.waiting.push(slice);
    longest_ns = std::max(longest_ns, link.waiting.forecast_ns());
  }
  call.deadline_ns = call.asked_ns + limit_ns(longest_ns);
}

// How long something may take for which so much is predicted.
int64_t Engine::limit_ns(int64_t predicted_ns) const {
  const int64_t most_ns = kMaxPatience * options_.call_timeout_ns;
  return std::max(options_.call_timeout_ns,
                  kPatience * std::min(predicted_ns, most_ns / kPatience));
}

void Engine::resume() {
  is_held_ = false;
  admit_parked();
  pump();
}

void Engine::close() {
  is_closed_ = true;
  const std::vector<CallPtr> calls = calls_;
  for (const CallPtr& call : calls) {
    const auto is_homeless = [](const Slice& one) { return one.state == SliceState::kHomeless; };
    // Nobody brings a worker back from now on.
    if (call->is_parked ||
        std::any_of(call->work->slices.begin(), call->work->slices.end(), is_homeless))
      fail(*call, closed_error());
  }
}

// Sends one slice per worker and round, so that every worker starts before any gets its second. In
// each round the worker with the longest predicted work comes first, because encoding for the
// others would delay it.
void Engine::pump() {
  for (bool has_sent = true; has_sent;) {
    has_sent = false;
    sending_order_.clear();
    for (const auto& link : links_) {
      if (!link->path.is_lost() && !link->waiting.empty()) sending_order_.push_back(link.get());
    }
    std::stable_sort(sending_order_.begin(), sending_order_.end(),
                     [](const Link* a, const Link* b) {
                       return a->waiting.forecast_ns() > b->waiting.forecast_ns();
                     });
    for (Link* link : sending_order_) has_sent |= send_next(*link);
  }
}

bool Engine::send_next(Link& link) {
  if (link.path.is_lost() || link.waiting.empty()) return false;
  const auto slot = link.path.free_slot(link.window);
  if (!slot) return false;
  Slice& slice = link.waiting.front();
  link.waiting.pop();
  send(link, slice, *slot, false);
  return true;
}

void Engine::send(Link& link, Slice& slice, uint32_t slot, bool is_hedge) {
  Attempt attempt{&slice, slice.num_attempts, is_hedge, !link.path.is_listening()};
  attempt.encode_start_ns = now_ns();
  auto message_bytes = encode_request(slice, attempt.number, link.path.generation(),
                                      link.path.channel()->outgoing(slot));
  if (!message_bytes.ok()) {
    return fail(*slice.call, std::move(message_bytes).error().at({link.name, {}, {}, slot}));
  }
  const LayerPlan& plan = slice.call->layer->plan;
  slice.state = SliceState::kInFlight;
  ++slice.num_attempts;
  ++slice.num_in_flight;
  attempt.request_bytes = message_bytes.value();
  attempt.published_ns = now_ns();
  attempt.asked_ns = clock_.at(attempt.published_ns);
  const int64_t predicted = link.path.forecast_ns() + slice.forecast_ns;
  attempt.limit_ns = limit_ns(predicted);
  if (predicted > 0) {
    attempt.patience_ns = std::max(kLeastPatienceNs, kLatePatience * predicted);
    if (has_replicas_ && !slice.is_hedged)
      next_hedge_ns_ = std::min(next_hedge_ns_, attempt.asked_ns + attempt.patience_ns);
  }
  link.ask(slot, attempt);
  link.last_layer = plan.layer;
  Counters& counters = link.counters[plan.layer];
  Status published = link.path.channel()->publish(slot, message_bytes.value());
  if (!published.ok()) return lose(link, published.error().code, published.error().message);
  if (is_hedge) {
    ++counters.hedges;
    counters.hedge_request_bytes += message_bytes.value();
    return;
  }
  ++counters.calls;
  counters.rows += slice.num_rows();
  counters.pairs += slice.num_pairs();
  counters.request_bytes += message_bytes.value();
  counters.floor_bytes += wire::floor_bytes(slice.num_rows(), slice.num_pairs(), plan.in_size,
                                            slice.request_dtype, plan.out_size, slice.reply_dtype);
}

void Engine::drive(Deadline tick, int wake_fd) {
  const int64_t began = now_ns();
  clock_.look(began);
  const int64_t left_ns = std::clamp(next_look_ns() - clock_.at(began), int64_t{0}, kTickNs);
  for (size_t i = 0; i < links_.size(); ++i) {
    const Path& path = links_[i]->path;
    transport::WaitEntry& entry = wait_entries_[i];
    entry.channel = path.is_listening() ? path.channel() : nullptr;
    entry.arrival.reset();
    entry.error.reset();
    entry.hangup_fd = links_[i]->liveness.fd();
    entry.has_hung_up = false;
  }
  wait_for_reply(tick.earlier(Deadline::at_ns(began + left_ns)), began, wake_fd);
  const int64_t real_now = now_ns();
  clock_.look(real_now);
  const int64_t now = clock_.at(real_now);
  charge_wait(real_now - began);
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = *links_[i];
    if (wait_entries_[i].channel == nullptr || link.path.is_lost()) continue;
    if (wait_entries_[i].error) {
      lose(link, wait_entries_[i].error->code, wait_entries_[i].error->message);
    } else if (wait_entries_[i].arrival) {
      take(link, *wait_entries_[i].arrival);
      drain(link);
    }
    if (wait_entries_[i].has_hung_up) judge(link, now);
  }
  judge_if_due(real_now);
  if (num_homeless_ > 0) rehome_all(now);
  if (num_parked_ > 0) admit_parked();
  if (has_replicas_ && now >= next_hedge_ns_) hedge_all(now);
  end_late_calls(now);
  pump();
}

// The first time at which something is late.
int64_t Engine::next_look_ns() const {
  int64_t next = has_replicas_ ? next_hedge_ns_ : std::numeric_limits<int64_t>::max();
  for (const CallPtr& call : calls_) next = std::min(next, call->deadline_ns);
  return next;
}

// Spinning through a computation of milliseconds would take a core from whoever else wants it;
// sleeping through all of it would add a wake-up to every call. So a wait sleeps while no reply can
// come, by the worker's model, and spins around the time at which one should. Where the model is
// wrong, the wait costs what it would have cost without: one wake-up, after at most this much
// spinning.
void Engine::wait_for_reply(Deadline until, int64_t now, int wake_fd) {
  const int64_t reply = spin_ns_ > 0 ? next_reply_ns() : 0;
  if (reply <= now) {
    transport::wait_any(wait_entries_, until, spin_ns_, wake_fd);
    return;
  }
  const int64_t quiet_until = reply - kWakeLeadNs;
  const int64_t spin_ns = reply - std::max(now, quiet_until) + spin_ns_;
  transport::wait_any(wait_entries_, until, spin_ns, wake_fd, quiet_until);
}

// When the first reply is predicted; 0 where a worker has several requests, which it takes in turns
// of unknown length, or where nothing is under way.
int64_t Engine::next_reply_ns() const {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const auto& link : links_) {
    const Path& path = link->path;
    if (path.is_lost() || path.num_in_flight() == 0) continue;
    if (path.num_in_flight() > 1) return 0;
    for (const Slot& slot : path.slots()) {
      if (slot.attempt.slice == nullptr) continue;
      first = std::min(first, slot.attempt.published_ns + slot.attempt.slice->forecast_ns);
      break;
    }
  }
  return first == std::numeric_limits<int64_t>::max() ? 0 : first;
}

void Engine::finish(Call& call) {
  Status combined = combiner_.combine(call);
  if (!combined.ok()) call.error = std::move(combined).error();
  if (is_profiling_) {
    for (const Slice& slice : call.work->slices) trace(call, slice);
  }
  end(call);
}

// Takes the call's memory back and tells its waiters. `call` may not exist any more afterwards.
void Engine::end(Call& call) {
  std::unique_ptr<CallWork> work = std::move(call.work);
  for (const ChunkForecast& forecast : work->forecasts) {
    if (forecast.slices_left == 0) continue;
    Link& link = *links_[forecast.worker];
    --link.num_chunks;
    link.tell_if_idle();  // it may only have waited for slices that others answered
  }
  for (Slice& slice : work->slices) {
    if (slice.state == SliceState::kHomeless) --num_homeless_;
    reply_buffers_.give_back(std::move(slice.reply_rows));
  }
  work->slices.clear();
  work->forecasts.clear();
  if (spare_works_.size() < kMaxSpareWorks && work->batch.num_tokens <= kMaxSpareListTokens)
    spare_works_.push_back(std::move(work));
  if (call.is_parked) --num_parked_;
  ++num_ended_;
  call.ended_ns = now_ns();
  call.done_ns = clock_.at(call.ended_ns);
  call.is_done.store(true, std::memory_order_release);
  std::erase_if(calls_, [&call](const CallPtr& one) { return one.get() == &call; });
}

void Engine::trace(const Call& call, const Slice& slice) {
  if (traces_.size() >= kMaxTraces) return;
  SliceTrace& one = traces_.emplace_back(slice.trace);
  one.call_id = call.id;
  one.layer = call.layer->plan.layer;
  one.shard = call.layer->plan.shards[slice.shard_index].shard;
  one.worker = slice.worker;
  one.slice = slice.index;
  one.num_rows = slice.num_rows();
  one.combined_ns = now_ns();
}

void Engine::charge_wait(int64_t elapsed_ns) {
  for (const auto& link : links_) {
    if (link->path.owes()) link->counters[link->last_layer].wait_ns += elapsed_ns;
  }
}

}  // namespace dflash::client
