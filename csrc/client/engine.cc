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
  links_.push_back(std::make_unique<Link>(std::move(worker)));
  wait_entries_.resize(links_.size());
  return static_cast<uint32_t>(links_.size() - 1);
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
  layers_.emplace(plan.layer, Layer{std::move(sorted), std::move(table).value()});
  return ok();
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

// Returns the first worker for which the call has rows and whose path is in `state`, or null.
const Link* Engine::link_that(const Call& call, PathState state) const {
  const LayerPlan& plan = call.layer->plan;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const Link& link = *links_[plan.shards[s].worker];
    if (!call.work->shard_rows[s].tokens.empty() && link.path.state() == state) return &link;
  }
  return nullptr;
}

Status Engine::refuse_lost_workers(const Call& call) const {
  const Link* lost = link_that(call, PathState::kLost);
  if (lost == nullptr) return ok();
  return lost->lost_error(*call.layer);
}

bool Engine::must_wait(const Call& call) const {
  return is_held_ || link_that(call, PathState::kWorn) != nullptr ||
         link_that(call, PathState::kLeased) != nullptr;
}

Status Engine::start(const CallPtr& call) {
  if (is_closed_) return closed_error();
  const int64_t now = now_ns();
  if (now - last_judged_ns_ > kTickNs) judge_all(now);
  DFLASH_TRY(refuse_lost_workers(*call));
  if (calls_.size() >= options_.max_calls) {
    return Error{ErrorCode::kInvalidArgument,
                 std::to_string(calls_.size()) + " calls are already submitted, the bound is " +
                     std::to_string(options_.max_calls) + "; take results before submitting more"};
  }
  call->id = next_call_id_++;
  call->submitted_ns = now;
  call->deadline_ns = now + options_.call_timeout_ns;
  if (must_wait(*call)) {
    call->is_parked = true;
    ++num_parked_;
    calls_.push_back(call);
    return ok();
  }
  call->begun_ns = now;
  DFLASH_TRY(cutter_.cut(*call, links_));
  calls_.push_back(call);
  enqueue(*call);
  pump();
  return ok();
}

// Cuts every parked call whose paths have become usable, in the order of submission.
void Engine::admit_parked() {
  if (num_parked_ == 0 || is_held_) return;
  const std::vector<CallPtr> calls = calls_;  // a copy: a call without rows ends and leaves calls_
  for (const CallPtr& call : calls) {
    if (!call->is_parked || must_wait(*call)) continue;
    call->is_parked = false;
    --num_parked_;
    call->begun_ns = now_ns();
    Status cut = cutter_.cut(*call, links_);
    if (cut.ok()) {
      enqueue(*call);
    } else {
      fail(*call, std::move(cut).error());
    }
  }
  pump();
}

// Hands the slices of a cut call to their links, and extends its deadline where they are predicted
// to take long. A call without rows is done at once.
void Engine::enqueue(Call& call) {
  if (call.work->slices.empty()) return finish(call);
  const LayerPlan& plan = call.layer->plan;
  for (uint32_t s = 0; s < plan.shards.size(); ++s) {
    if (call.work->forecasts[s].slices_left == 0) continue;
    Link& link = *links_[plan.shards[s].worker];
    call.work->forecasts[s].is_alone = link.num_chunks == 0;
    if (link.num_chunks++ > 0) link.crowded_ns = call.begun_ns;
  }
  int64_t longest_ns = 0;
  for (Slice& slice : call.work->slices) {
    Link& link = *links_[slice.worker];
    link.waiting.push(slice);
    longest_ns = std::max(longest_ns, link.waiting.forecast_ns());
  }
  const int64_t most_ns = kMaxPatience * options_.call_timeout_ns;
  call.deadline_ns =
      call.submitted_ns +
      std::max(options_.call_timeout_ns, kPatience * std::min(longest_ns, most_ns / kPatience));
}

void Engine::resume() {
  is_held_ = false;
  admit_parked();
}

void Engine::close() {
  is_closed_ = true;
  const std::vector<CallPtr> calls = calls_;
  for (const CallPtr& call : calls) {
    if (call->is_parked) fail(*call, closed_error());
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
  send(link, slice, *slot);
  return true;
}

void Engine::send(Link& link, Slice& slice, uint32_t slot) {
  slice.found_idle = !link.path.is_listening();
  slice.trace.begun_ns = slice.call->begun_ns;
  slice.trace.encode_start_ns = now_ns();
  auto message_bytes =
      encode_request(slice, link.path.generation(), link.path.channel()->outgoing(slot));
  if (!message_bytes.ok()) {
    return fail(*slice.call, std::move(message_bytes).error().at({link.name, {}, {}, slot}));
  }
  const LayerPlan& plan = slice.call->layer->plan;
  slice.state = SliceState::kInFlight;
  slice.request_bytes = message_bytes.value();
  slice.trace.published_ns = now_ns();
  if (!link.path.owes()) link.liveness.begin_to_owe(slice.trace.published_ns);
  link.path.put_in_flight(slot, &slice);
  link.last_layer = plan.layer;
  Status published = link.path.channel()->publish(slot, message_bytes.value());
  if (!published.ok()) return lose(link, published.error().code, published.error().message);
  Counters& counters = link.counters[plan.layer];
  ++counters.calls;
  counters.rows += slice.num_rows();
  counters.pairs += slice.num_pairs();
  counters.request_bytes += message_bytes.value();
  counters.floor_bytes += wire::floor_bytes(slice.num_rows(), slice.num_pairs(), plan.in_size,
                                            slice.request_dtype, plan.out_size, slice.reply_dtype);
}

void Engine::drive(Deadline tick, int wake_fd) {
  const int64_t began = now_ns();
  Deadline until = tick.earlier(Deadline::at_ns(began + kTickNs));
  for (const CallPtr& call : calls_) until = until.earlier(Deadline::at_ns(call->deadline_ns));
  for (size_t i = 0; i < links_.size(); ++i) {
    const Path& path = links_[i]->path;
    wait_entries_[i].channel = path.is_listening() ? path.channel() : nullptr;
    wait_entries_[i].arrival.reset();
    wait_entries_[i].error.reset();
  }
  wait_for_reply(until, began, wake_fd);
  const int64_t now = now_ns();
  charge_wait(now - began);
  for (size_t i = 0; i < links_.size(); ++i) {
    Link& link = *links_[i];
    if (wait_entries_[i].channel == nullptr || link.path.is_lost()) continue;
    if (wait_entries_[i].error) {
      lose(link, wait_entries_[i].error->code, wait_entries_[i].error->message);
    } else if (wait_entries_[i].arrival) {
      take(link, *wait_entries_[i].arrival);
      drain(link);
    }
  }
  if (now - last_judged_ns_ > kTickNs) judge_all(now);
  end_late_calls(now);
  pump();
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
    for (uint32_t i = 0; const Slot* slot = path.slot(i); ++i) {
      if (slot->slice == nullptr) continue;
      first = std::min(first, slot->slice->trace.published_ns + slot->slice->forecast_ns);
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
  for (size_t s = 0; s < work->forecasts.size(); ++s) {
    if (work->forecasts[s].slices_left > 0) --links_[call.layer->plan.shards[s].worker]->num_chunks;
  }
  for (Slice& slice : work->slices) reply_buffers_.give_back(std::move(slice.reply_rows));
  work->slices.clear();
  work->forecasts.clear();
  if (spare_works_.size() < kMaxSpareWorks && work->batch.num_tokens <= kMaxSpareListTokens)
    spare_works_.push_back(std::move(work));
  if (call.is_parked) --num_parked_;
  ++num_ended_;
  call.ended_ns = now_ns();
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
