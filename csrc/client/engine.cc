// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"

#include <algorithm>

#include "client/cut.h"
#include "client/encode.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr size_t kMaxSpareWorks = 16;             // calls under way at once in practice
constexpr size_t kMaxSpareListTokens = 64 << 10;  // lists that grew larger are freed, not kept

Error plan_error(const LayerPlan& plan, const std::string& what) {
  return Error{ErrorCode::kInvalidArgument, "layer " + plan.name + ": " + what};
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

uint32_t Engine::add_worker(WorkerLink link) {
  workers_.push_back(std::make_unique<WorkerEnd>(std::move(link)));
  wait_entries_.resize(workers_.size());
  return static_cast<uint32_t>(workers_.size() - 1);
}

Status Engine::define_layer(const LayerPlan& plan) {
  if (layers_.contains(plan.layer))
    return plan_error(plan, "index " + std::to_string(plan.layer) + " is already defined");
  LayerPlan sorted = plan;
  std::sort(sorted.shards.begin(), sorted.shards.end(),
            [](const auto& a, const auto& b) { return a.shard < b.shard; });
  DFLASH_TRY(check_plan(sorted, workers_.size()));
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

Status Engine::refuse_lost_workers(const Call& call) const {
  const LayerPlan& plan = call.layer->plan;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const WorkerEnd& worker = *workers_[plan.shards[s].worker];
    if (worker.is_lost && !call.work->shard_rows[s].tokens.empty()) {
      return Error{ErrorCode::kWorkerLost, "worker " + worker.link.name + " was lost: " +
                                               worker.reason + " (layer " + plan.name + ")"};
    }
    if ((worker.is_leased || worker.is_retired) && !call.work->shard_rows[s].tokens.empty()) {
      return Error{ErrorCode::kInvalidArgument,
                   "worker " + worker.link.name +
                       (worker.is_leased ? " is used by a device step; end it first"
                                         : " had a failed step; replace its channel")};
    }
  }
  return ok();
}

Status Engine::start(const CallPtr& call) {
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
  DFLASH_TRY(cut(*call));
  call->work->parts_left = call->work->parts.size();
  calls_.push_back(call);
  if (call->work->parts.empty()) {
    finish(*call);
    return ok();
  }
  enqueue_parts(*call);
  pump();
  return ok();
}

void Engine::enqueue_parts(Call& call) {
  const LayerPlan& plan = call.layer->plan;
  for (uint32_t s = 0; s < plan.shards.size(); ++s) {
    if (call.work->forecasts[s].parts_left == 0) continue;
    WorkerEnd& worker = *workers_[plan.shards[s].worker];
    call.work->forecasts[s].is_alone = worker.num_shard_calls == 0;
    if (worker.num_shard_calls++ > 0) worker.crowded_ns = call.submitted_ns;
  }
  int64_t longest_ns = 0;
  for (Part& part : call.work->parts) {
    WorkerEnd& worker = *workers_[part.worker];
    worker.enqueue(&part);
    longest_ns = std::max(longest_ns, worker.waiting_forecast_ns());
  }
  const int64_t most_ns = kMaxPatience * options_.call_timeout_ns;
  call.deadline_ns =
      call.submitted_ns +
      std::max(options_.call_timeout_ns, kPatience * std::min(longest_ns, most_ns / kPatience));
}

Status Engine::cut(Call& call) {
  const LayerPlan& plan = call.layer->plan;
  call.work->forecasts.assign(plan.shards.size(), ShardForecast());
  for (uint32_t s = 0; s < plan.shards.size(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    WorkerEnd& worker = *workers_[plan.shards[s].worker];
    auto num_splits = cut_shard_by_model(call, s, worker);
    if (!num_splits.ok()) return std::move(num_splits).error().with("worker " + worker.link.name);
    if (num_splits.value() > 0) worker.counters[plan.layer].splits += num_splits.value();
  }
  return ok();
}

// Asks the worker's model for the number of slices; with a fixed policy only for the time they
// should take.
Result<uint64_t> Engine::cut_shard_by_model(Call& call, uint32_t shard_index, WorkerEnd& worker) {
  const LayerPlan& plan = call.layer->plan;
  const ShardRows& rows = call.work->shard_rows[shard_index];
  const size_t num_local_experts = plan.shards[shard_index].experts.size();
  const SlicePolicy& policy = worker.link.policy;
  Chunk chunk;
  chunk.num_tokens = call.work->batch.num_tokens;
  chunk.least_slices = num_slices(chunk.num_tokens, policy.slice_tokens);
  chunk.rows = static_cast<double>(rows.tokens.size());
  chunk.pairs = static_cast<double>(rows.local_expert_ids.size());
  chunk.experts = count_experts(rows.local_expert_ids, num_local_experts);
  chunk.request_bytes =
      chunk.rows * static_cast<double>(plan.in_size * dtype_bytes(worker.link.request_dtype));
  chunk.reply_bytes =
      chunk.rows * static_cast<double>(plan.out_size * dtype_bytes(worker.link.reply_dtype));
  const SliceChoice choice =
      worker.model.choose(plan.cost_class, chunk, policy.window, !policy.is_measured);
  worker.window = policy.is_measured ? choice.taken.window : policy.window;

  const uint32_t slice_tokens =
      policy.is_measured
          ? (chunk.num_tokens + choice.taken.num_slices - 1) / choice.taken.num_slices
          : policy.slice_tokens;
  const CutLimits limits{slice_tokens, worker.link.channel->geometry(), worker.link.request_dtype,
                         worker.link.reply_dtype};
  const size_t first = call.work->parts.size();
  auto num_splits = cut_shard(call, shard_index, plan.shards[shard_index].worker, limits);
  const auto num_parts = static_cast<uint32_t>(call.work->parts.size() - first);
  call.work->forecasts[shard_index] = {static_cast<int64_t>(choice.taken.ns), num_parts, false};
  for (size_t i = first; i < call.work->parts.size(); ++i) {
    Part& part = call.work->parts[i];
    part.forecast_ns = static_cast<int64_t>(choice.taken.ns / num_parts);
    part.num_experts =
        num_parts == 1
            ? static_cast<uint32_t>(chunk.experts)
            : count_experts(
                  std::span(rows.local_expert_ids).subspan(part.pair_begin, part.num_pairs()),
                  num_local_experts);
  }
  return num_splits;
}

uint32_t Engine::count_experts(std::span<const uint16_t> local_expert_ids,
                               size_t num_local_experts) {
  if (expert_seen_.size() < num_local_experts) expert_seen_.resize(num_local_experts, 0);
  ++num_counts_;
  uint32_t count = 0;
  for (const uint16_t id : local_expert_ids) {
    count += expert_seen_[id] != num_counts_ ? 1 : 0;
    expert_seen_[id] = num_counts_;
  }
  return count;
}

// One part a worker and round, so that every worker starts before any gets its second; in each
// round the worker with the longest predicted work first, because the others' encoding would delay
// it.
void Engine::pump() {
  for (bool has_sent = true; has_sent;) {
    has_sent = false;
    sending_order_.clear();
    for (uint32_t i = 0; i < workers_.size(); ++i) {
      if (!workers_[i]->is_lost && !workers_[i]->waiting.empty()) sending_order_.push_back(i);
    }
    std::stable_sort(sending_order_.begin(), sending_order_.end(), [this](uint32_t a, uint32_t b) {
      return workers_[a]->waiting_forecast_ns() > workers_[b]->waiting_forecast_ns();
    });
    for (const uint32_t i : sending_order_) has_sent |= send_next(*workers_[i]);
  }
}

bool Engine::send_next(WorkerEnd& worker) {
  if (worker.is_lost || worker.waiting.empty()) return false;
  const auto slot = worker.acquire();
  if (!slot) return false;
  Part& part = *worker.dequeue();
  send(worker, part, *slot);
  return true;
}

void Engine::send(WorkerEnd& worker, Part& part, uint32_t slot) {
  part.found_idle = !worker.is_listening();
  part.trace.encode_start_ns = now_ns();
  auto message_bytes =
      encode_request(part, worker.link.generation, worker.link.channel->outgoing(slot));
  if (!message_bytes.ok()) return fail(*part.call, std::move(message_bytes).error());
  const LayerPlan& plan = part.call->layer->plan;
  part.state = PartState::kInFlight;
  part.request_bytes = message_bytes.value();
  part.trace.published_ns = now_ns();
  worker.put_in_flight(slot, &part, part.trace.published_ns);
  Status published = worker.link.channel->publish(slot, message_bytes.value());
  if (!published.ok()) return lose(worker, published.error().code, published.error().message);
  Counters& counters = worker.counters[plan.layer];
  ++counters.calls;
  counters.rows += part.num_rows();
  counters.pairs += part.num_pairs();
  counters.request_bytes += message_bytes.value();
  counters.floor_bytes += wire::floor_bytes(part.num_rows(), part.num_pairs(), plan.in_size,
                                            part.request_dtype, plan.out_size, part.reply_dtype);
}

void Engine::drive(Deadline tick, int wake_fd) {
  const int64_t began = now_ns();
  Deadline until = tick.earlier(Deadline::at_ns(began + kTickNs));
  for (const CallPtr& call : calls_) until = until.earlier(Deadline::at_ns(call->deadline_ns));
  for (size_t i = 0; i < workers_.size(); ++i) {
    wait_entries_[i].channel =
        workers_[i]->is_listening() ? workers_[i]->link.channel.get() : nullptr;
    wait_entries_[i].arrival.reset();
    wait_entries_[i].error.reset();
  }
  transport::wait_any(wait_entries_, until, options_.spin_ns, wake_fd);
  const int64_t now = now_ns();
  charge_wait(now - began);
  for (size_t i = 0; i < workers_.size(); ++i) {
    WorkerEnd& worker = *workers_[i];
    if (wait_entries_[i].channel == nullptr || worker.is_lost) continue;
    if (wait_entries_[i].error) {
      lose(worker, wait_entries_[i].error->code, wait_entries_[i].error->message);
    } else if (wait_entries_[i].arrival) {
      receive(worker, *wait_entries_[i].arrival);
      drain(worker);
    }
  }
  if (now - last_judged_ns_ > kTickNs) judge_all(now);
  end_late_calls(now);
  pump();
}

void Engine::finish(Call& call) {
  Status combined = combiner_.combine(call);
  if (!combined.ok()) call.error = std::move(combined).error();
  if (is_profiling_) {
    for (const Part& part : call.work->parts) trace(call, part);
  }
  end(call);
}

// Takes the call's memory back and tells its waiters. `call` may be gone afterwards.
void Engine::end(Call& call) {
  std::unique_ptr<CallWork> work = std::move(call.work);
  for (size_t s = 0; s < work->forecasts.size(); ++s) {
    if (work->forecasts[s].parts_left > 0)
      --workers_[call.layer->plan.shards[s].worker]->num_shard_calls;
  }
  for (Part& part : work->parts) reply_buffers_.give_back(std::move(part.reply_rows));
  work->parts.clear();
  if (spare_works_.size() < kMaxSpareWorks && work->batch.num_tokens <= kMaxSpareListTokens)
    spare_works_.push_back(std::move(work));
  ++num_ended_;
  call.is_done.store(true, std::memory_order_release);
  std::erase_if(calls_, [&call](const CallPtr& one) { return one.get() == &call; });
}

void Engine::trace(const Call& call, const Part& part) {
  if (traces_.size() >= kMaxTraces) return;
  SliceTrace& one = traces_.emplace_back(part.trace);
  one.call_id = call.id;
  one.layer = call.layer->plan.layer;
  one.shard = call.layer->plan.shards[part.shard_index].shard;
  one.worker = part.worker;
  one.slice = part.slice;
  one.num_rows = part.num_rows();
  one.combined_ns = now_ns();
}

void Engine::charge_wait(int64_t elapsed_ns) {
  for (const auto& worker : workers_) {
    if (worker->owes()) worker->counters[worker->last_layer].wait_ns += elapsed_ns;
  }
}

}  // namespace dflash::client
