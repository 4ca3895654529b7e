// How calls begin and end. Adding up walks over all shards at once, token by token: each shard's
// rows are in ascending token order, so that one cursor per shard suffices.
// SPDX-License-Identifier: Apache-2.0
#include "client/calls.h"

#include <algorithm>

#include "base/dtype.h"
#include "base/float_mode.h"

namespace dflash::client {
namespace {

constexpr size_t kMaxSpareWorks = 16;             // as many calls are under way in practice
constexpr size_t kMaxSpareListTokens = 64 << 10;  // larger lists are freed instead of kept

Error closed_error() {
  return Error{ErrorCode::kClosed,
               "the runtime was closed before this call was done; take results before close()"};
}

}  // namespace

// -- beginning --

std::unique_ptr<CallWork> Calls::take_work() {
  if (spare_works_.empty()) return std::make_unique<CallWork>();
  auto work = std::move(spare_works_.back());
  spare_works_.pop_back();
  return work;
}

// Returns how those shards stand for which the call has rows: the worst of them.
Calls::WorstShard Calls::worst_shard(const Call& call, int64_t now) const {
  WorstShard worst;
  for (size_t s = 0; s < call.layer->holders.size(); ++s) {
    if (call.work->shard_rows[s].tokens.empty()) continue;
    const Outlook outlook =
        outlook_of(call.layer->holders[s], crew_.links, now, crew_.options.reconnect_grace_ns);
    if (outlook > worst.outlook) worst = {outlook, s};
  }
  return worst;
}

Status Calls::start(const CallPtr& call, int64_t real_now) {
  if (is_closed_) return closed_error();
  const int64_t now = crew_.clock.at(real_now);
  const WorstShard worst = worst_shard(*call, now);
  if (worst.outlook == Outlook::kGone)
    return lost_shard_error(*call->layer, call->layer->holders[worst.index], crew_.links);
  if (calls_.size() >= crew_.options.max_calls) {
    return Error{ErrorCode::kInvalidArgument, std::to_string(calls_.size()) +
                                                  " calls are already submitted, the bound is " +
                                                  std::to_string(crew_.options.max_calls) +
                                                  "; take results before submitting more"};
  }
  call->id = take_ids(1);
  call->submitted_ns = real_now;
  call->asked_ns = now;
  call->deadline_ns = now + crew_.options.call_timeout_ns;
  call->is_parked = is_held_ || worst.outlook != Outlook::kUsable;
  calls_.push_back(call);
  if (call->is_parked) {
    ++num_parked_;
    return ok();
  }
  Status done = cut(*call, real_now);
  if (!done.ok()) calls_.pop_back();
  return done;
}

void Calls::admit_parked() {
  if (num_parked_ == 0) return;
  const int64_t real_now = now_ns(), now = crew_.clock.at(real_now);
  const std::vector<CallPtr> calls = calls_;  // a copy: calls that end leave calls_
  for (const CallPtr& call : calls) {
    if (!call->is_parked) continue;
    const WorstShard worst = worst_shard(*call, now);
    const bool has_waited = now - call->asked_ns > crew_.options.park_ns;
    if (worst.outlook == Outlook::kGone || (worst.outlook == Outlook::kComingBack && has_waited)) {
      fail(*call, lost_shard_error(*call->layer, call->layer->holders[worst.index], crew_.links));
      continue;
    }
    if (is_held_ || worst.outlook != Outlook::kUsable) continue;
    call->is_parked = false;
    --num_parked_;
    if (Status done = cut(*call, real_now); !done.ok()) fail(*call, std::move(done).error());
  }
}

// Cuts a call, hands its slices to their links, and extends its deadline where they are predicted
// to take long. A call without rows is done at once.
Status Calls::cut(Call& call, int64_t real_now) {
  call.begun_ns = real_now;
  DFLASH_TRY(cutter_.cut(call, crew_.links));
  if (call.work->slices.empty()) {
    finish(call);
    return ok();
  }
  for (ChunkForecast& forecast : call.work->forecasts) {
    if (forecast.slices_left == 0) continue;
    Link& link = *crew_.links[forecast.worker];
    forecast.is_alone = link.num_chunks == 0;
    if (link.num_chunks++ > 0) link.crowded_ns = real_now;
  }
  int64_t longest_ns = 0;
  for (Slice& slice : call.work->slices) {
    Link& link = *crew_.links[slice.worker];
    link.waiting.push(slice);
    longest_ns = std::max(longest_ns, link.waiting.forecast_ns() + link.behind_ns());
  }
  call.deadline_ns = call.asked_ns + limit_ns(longest_ns);
  return ok();
}

int64_t Calls::limit_ns(int64_t predicted_ns) const {
  const int64_t timeout_ns = crew_.options.call_timeout_ns, most_ns = kMaxPatience * timeout_ns;
  return std::max(timeout_ns, kPatience * std::min(predicted_ns, most_ns / kPatience));
}

void Calls::make_homeless(Slice& slice, const Link& from) {
  slice.state = SliceState::kHomeless;
  ++num_homeless_;
  slice.trouble().worker = from.index;
  slice.call->work->forecasts[slice.shard_index].is_alone = false;
}

void Calls::give(Slice& slice, Link& home, int64_t now) {
  if (slice.state == SliceState::kHomeless) --num_homeless_;
  slice.state = SliceState::kWaiting;
  slice.worker = home.index;
  home.waiting.push_front(slice);
  extend(*slice.call, now + limit_ns(home.backlog_ns()));
}

// -- ending --

const std::byte* Combiner::Cursor::take(uint32_t token, size_t out_size) {
  if (row == rows->tokens.size() || rows->tokens[row] != token) return nullptr;
  if (row == slice->row_end) ++slice;  // slices of a shard lie side by side
  return slice->reply_rows.bytes.get() +
         (row++ - slice->row_begin) * out_size * dtype_bytes(slice->reply_dtype);
}

Status Combiner::combine(const Call& call) {
  // Whoever drives adds up other threads' calls too, in whatever mode its own thread is.
  const CanonicalFloatMode mode;
  const size_t out_size = call.layer->plan.out_size;
  const TokenBatch& batch = call.work->batch;
  cursors_.clear();
  for (const Slice& slice : call.work->slices) {
    if (slice.row_begin == 0)
      cursors_.push_back({&call.work->shard_rows[slice.shard_index], &slice, 0});
  }
  sums_.resize(out_size);
  for (uint32_t token = 0; token < batch.num_tokens; ++token) {
    std::fill(sums_.begin(), sums_.end(), 0.0f);
    for (Cursor& cursor : cursors_) {
      const std::byte* row = cursor.take(token, out_size);
      if (row != nullptr) widen_add(cursor.slice->reply_dtype, row, sums_.data(), out_size);
    }
    std::byte* out = batch.output + token * out_size * dtype_bytes(batch.dtype);
    if (!convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums_.data()), batch.dtype, out,
                 out_size)) {
      return Error{ErrorCode::kRange,
                   "layer " + call.layer->plan.name + ", token " + std::to_string(token) +
                       ": the sum of its experts does not fit " + dtype_name(batch.dtype) +
                       "; run the model in bf16 or f32"}
          .at({{}, call.layer->plan.layer, token, {}});
    }
  }
  return ok();
}

void Calls::finish(Call& call) {
  Status combined = combiner_.combine(call);
  if (!combined.ok()) call.error = std::move(combined).error();
  if (is_profiling_) {
    for (const Slice& slice : call.work->slices) trace(call, slice);
  }
  end(call);
}

void Calls::fail(Call& call, Error error) {
  if (call.is_done) return;
  call.error = std::move(error);
  for (const auto& link : crew_.links) {
    link->waiting.take_out([&call](const Slice& slice) { return slice.call == &call; });
    link->path.quarantine_all_of(call);
  }
  end(call);
}

void Calls::close() {
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

// Takes the call's memory back and tells its waiters. `call` may not exist any more afterwards.
void Calls::end(Call& call) {
  std::unique_ptr<CallWork> work = std::move(call.work);
  for (const ChunkForecast& forecast : work->forecasts) {
    if (forecast.slices_left == 0) continue;
    Link& link = *crew_.links[forecast.worker];
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
  call.done_ns = crew_.clock.at(call.ended_ns);
  call.is_done.store(true, std::memory_order_release);
  std::erase_if(calls_, [&call](const CallPtr& one) { return one.get() == &call; });
}

void Calls::trace(const Call& call, const Slice& slice) {
  if (traces_.size() >= kMaxTraces) return;
  const LayerPlan& plan = call.layer->plan;
  const ReplyTimes& times = slice.times;
  traces_.push_back({call.id, plan.layer, plan.shards[slice.shard_index].shard, slice.worker,
                     slice.index, slice.num_rows(), call.begun_ns, times.encode_start_ns,
                     times.published_ns, times.arrived_ns, now_ns(), times.worker_received_ns,
                     times.worker_started_ns, times.worker_finished_ns});
}

}  // namespace dflash::client
