// What the engine does with the answers of workers. Whatever does not match what was asked ends the
// worker, never the host.
// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"

namespace dflash::client {
namespace {

constexpr uint64_t kMaxDurationNs = 3'600'000'000'000;  // an hour, beyond any deadline of a call

// The time between two readings of a worker's clock. They are only numbers that it sent, so that
// nonsense counts as 0.
int64_t duration_ns(int64_t from, int64_t to) {
  if (to <= from) return 0;
  const uint64_t duration = static_cast<uint64_t>(to) - static_cast<uint64_t>(from);
  return duration <= kMaxDurationNs ? static_cast<int64_t>(duration) : 0;
}

}  // namespace

// Takes everything that has arrived. The credits bound how much that can be.
void Engine::drain(Link& link) {
  while (link.path.is_listening()) {
    auto polled = link.path.channel()->poll();
    if (!polled.ok()) return lose(link, polled.error().code, polled.error().message);
    if (!polled.value()) return;
    take(link, *polled.value());
  }
}

void Engine::drain_all() {
  for (const auto& link : links_) drain(*link);
}

void Engine::take(Link& link, const transport::Arrival& arrival) {
  auto taken = take_answer(link.path, arrival, reply_buffers_);
  if (!taken.ok()) return lose(link, taken.error().code, taken.error().message);
  const Answer& answer = taken.value();
  if (answer.attempt.slice == nullptr) {
    ++link.stale_replies;
    if (answer.is_superseded)
      ++link.counters[link.path.slot(answer.slot)->quarantine->layer].superseded;
    link.release(answer.slot, clock_);
    link.tell_if_idle();
    admit_parked();  // because the path may have enough slots again
    return pump();
  }
  return answer.refusal ? take_refusal(link, answer) : take_rows(link, answer);
}

// Only a range error is about the caller's numbers, and every holder would answer the same. Every
// other refusal means that host and worker disagree, or that the worker is in trouble.
void Engine::take_refusal(Link& link, const Answer& answer) {
  Slice& slice = *answer.attempt.slice;
  Call& call = *slice.call;
  const LayerPlan& plan = call.layer->plan;
  link.counters[plan.layer].reply_bytes += answer.num_bytes;
  link.release(answer.slot, clock_);
  --slice.num_in_flight;
  const bool is_range = answer.refusal->code == ErrorCode::kRange;
  Error error = Error{is_range ? ErrorCode::kRange : ErrorCode::kWorkerFailed,
                      "worker " + link.name + ", layer " + plan.name + ": " + answer.refusal->text}
                    .at({link.name, plan.layer, {}, answer.slot});
  link.tell_if_idle();
  if (is_range) return fail(call, std::move(error));
  ++link.counters[plan.layer].failovers;
  if (slice.troubles == nullptr) slice.troubles = std::make_unique<SliceTroubles>();
  slice.troubles->refused_by.push_back(link.index);
  slice.troubles->add(std::move(error));
  if (slice.num_in_flight > 0) return;  // another holder is still at it
  make_homeless(slice, link);
  rehome_all(now());
}

void Engine::take_rows(Link& link, const Answer& answer) {
  const Attempt& attempt = answer.attempt;
  Slice& slice = *attempt.slice;
  Call& call = *slice.call;
  Counters& counters = link.counters[call.layer->plan.layer];
  (attempt.is_hedge ? counters.hedge_reply_bytes : counters.reply_bytes) += answer.num_bytes;
  counters.hedges_won += attempt.is_hedge ? 1 : 0;
  counters.worker_compute_ns += duration_ns(answer.timing.started_ns, answer.timing.finished_ns);
  counters.worker_queue_ns += duration_ns(answer.timing.received_ns, answer.timing.started_ns);
  slice.worker = link.index;
  slice.trace.begun_ns = call.begun_ns;
  slice.trace.encode_start_ns = attempt.encode_start_ns;
  slice.trace.published_ns = attempt.published_ns;
  slice.trace.arrived_ns = now_ns();
  slice.trace.worker_received_ns = answer.timing.received_ns;
  slice.trace.worker_started_ns = answer.timing.started_ns;
  slice.trace.worker_finished_ns = answer.timing.finished_ns;
  learn(link, attempt, answer.num_bytes);
  slice.state = SliceState::kArrived;
  link.release(answer.slot, clock_);
  if (--slice.num_in_flight > 0) {
    for (const auto& other : links_) other->supersede(slice);
    slice.num_in_flight = 0;
  }
  hedge_budget_.earn();
  link.tell_if_idle();
  if (--call.work->slices_left == 0) finish(call);
}

// Tells the worker's model what one slice took and, with a chunk's last reply, what the whole chunk
// took.
void Engine::learn(Link& link, const Attempt& attempt, uint64_t reply_bytes) {
  const Slice& slice = *attempt.slice;
  const Call& call = *slice.call;
  const LayerPlan& plan = call.layer->plan;
  const SliceTrace& t = slice.trace;
  link.model.observe(plan.cost_class,
                     {slice.num_pairs(), slice.num_experts, attempt.request_bytes, reply_bytes},
                     {t.encode_start_ns, t.published_ns, t.arrived_ns, t.worker_received_ns,
                      t.worker_started_ns, t.worker_finished_ns, attempt.found_idle});
  ChunkForecast& forecast = call.work->forecasts[slice.shard_index];
  if (forecast.worker != link.index) forecast.is_alone = false;
  if (--forecast.slices_left > 0) return;
  Link& planned = *links_[forecast.worker];
  --planned.num_chunks;
  if (&planned != &link) planned.tell_if_idle();  // others have answered what it was to answer
  if (!forecast.is_alone || planned.crowded_ns >= call.begun_ns || forecast.predicted.ns == 0)
    return;
  planned.model.record(plan.cost_class, call.work->batch.num_tokens, forecast.predicted,
                       static_cast<double>(t.arrived_ns - call.begun_ns));
}

}  // namespace dflash::client
