// SPDX-License-Identifier: Apache-2.0
#include "client/engine.h"

#include <algorithm>
#include <cstdio>

#include "base/checksum.h"
#include "client/combine.h"
#include "client/encode.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr size_t kMaxSpareBuffers = 64;

std::string seconds_text(int64_t nanoseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(nanoseconds) / 1e9);
  return text;
}

}  // namespace

uint32_t Engine::add_worker(WorkerLink link) {
  workers_.push_back(std::make_unique<WorkerEnd>(std::move(link)));
  wait_entries_.resize(workers_.size());
  return static_cast<uint32_t>(workers_.size() - 1);
}

Status Engine::define_layer(const LayerPlan& plan) {
  if (layers_.contains(plan.layer)) {
    return Error{ErrorCode::kInvalidArgument, "layer " + std::to_string(plan.layer) + " is already defined"};
  }
  LayerPlan sorted = plan;
  std::sort(sorted.shards.begin(), sorted.shards.end(), [](const auto& a, const auto& b) { return a.shard < b.shard; });
  std::vector<std::vector<uint32_t>> experts;
  for (size_t s = 0; s < sorted.shards.size(); ++s) {
    const ShardPlace& shard = sorted.shards[s];
    if (shard.worker >= workers_.size() || (s > 0 && shard.shard == sorted.shards[s - 1].shard)) {
      return Error{ErrorCode::kInvalidArgument,
                   "layer " + plan.name + ": shard " + std::to_string(shard.shard) + " is listed twice or names no worker"};
    }
    experts.push_back(shard.experts);
  }
  auto table = ExpertTable::build(plan.num_experts, experts);
  if (!table.ok()) return std::move(table).error().with("layer " + plan.name);
  layers_.emplace(plan.layer, Layer{std::move(sorted), std::move(table).value()});
  return ok();
}

const Layer* Engine::layer(uint32_t index) const {
  const auto found = layers_.find(index);
  return found == layers_.end() ? nullptr : &found->second;
}

Status Engine::start(const CallPtr& call) {
  const int64_t now = now_ns();
  if (now - last_judged_ns_ > kTickNs) judge_all(now);
  const LayerPlan& plan = call->layer->plan;
  for (size_t s = 0; s < plan.shards.size(); ++s) {
    const WorkerEnd& worker = *workers_[plan.shards[s].worker];
    if (worker.is_lost && !call->shard_rows[s].tokens.empty()) {
      return Error{ErrorCode::kWorkerLost, "worker " + worker.link.name + " was lost: " + worker.reason + " (layer " + plan.name + ")"};
    }
  }
  if (calls_.size() >= options_.max_calls) {
    return Error{ErrorCode::kInvalidArgument, std::to_string(calls_.size()) + " calls are already submitted, the bound is " +
                                                  std::to_string(options_.max_calls) + "; take results before submitting more"};
  }
  call->id = next_call_id_++;
  call->deadline_ns = now + options_.call_timeout_ns;
  DFLASH_TRY(cut(*call));
  call->parts_left = call->parts.size();
  if (call->parts.empty()) {
    finish(*call);
    return ok();
  }
  calls_.push_back(call);
  for (const auto& part : call->parts) workers_[part->worker]->waiting.push_back(part.get());
  pump();
  return ok();
}

Status Engine::cut(Call& call) {
  const LayerPlan& plan = call.layer->plan;
  for (uint32_t s = 0; s < plan.shards.size(); ++s) {
    const ShardRows& rows = call.shard_rows[s];
    if (rows.tokens.empty()) continue;
    const WorkerEnd& worker = *workers_[plan.shards[s].worker];
    Part next;
    next.call = &call;
    next.shard_index = s;
    next.worker = plan.shards[s].worker;
    next.request_dtype = worker.link.request_dtype;
    next.reply_dtype = worker.link.reply_dtype;
    uint32_t row_end = 0;
    uint16_t slice = 0;
    for (const uint32_t token_end : slice_ends(call.batch.num_tokens, worker.link.policy.slice_tokens)) {
      while (row_end < rows.tokens.size() && rows.tokens[row_end] < token_end) ++row_end;
      DFLASH_TRY(cut_slice(call, s, row_end, slice++, next));
    }
  }
  return ok();
}

// Appends the parts of rows [next.row_begin, row_end): one, or halves of halves where a slot is too small for more.
Status Engine::cut_slice(Call& call, uint32_t shard_index, uint32_t row_end, uint16_t slice, Part& next) {
  const LayerPlan& plan = call.layer->plan;
  const ShardRows& rows = call.shard_rows[shard_index];
  WorkerEnd& worker = *workers_[next.worker];
  const transport::SlotGeometry& slot = worker.link.channel->geometry();
  while (next.row_begin < row_end) {
    uint32_t num_rows = row_end - next.row_begin;
    for (;; num_rows = (num_rows + 1) / 2) {
      uint32_t num_pairs = 0;
      for (uint32_t row = 0; row < num_rows; ++row) num_pairs += rows.row_counts[next.row_begin + row];
      const uint64_t request = request_message_bytes(plan, num_rows, num_pairs, next.request_dtype);
      const uint64_t reply = reply_message_bytes(plan, num_rows, next.reply_dtype);
      if (request != 0 && reply != 0 && request <= slot.request_bytes && reply <= slot.reply_bytes) {
        next.pair_end = next.pair_begin + num_pairs;
        break;
      }
      if (num_rows == 1) {
        return Error{ErrorCode::kInvalidArgument, "layer " + plan.name + ": a row with " + std::to_string(num_pairs) +
                                                      " experts does not fit a slot of worker " + worker.link.name +
                                                      "; raise ipc.shared_bytes"};
      }
    }
    if (next.row_begin + num_rows < row_end) ++worker.counters[plan.layer].splits;
    auto part = std::make_unique<Part>();
    part->call = next.call;
    part->shard_index = shard_index;
    part->worker = next.worker;
    part->slice = slice;
    part->row_begin = next.row_begin;
    part->row_end = next.row_begin + num_rows;
    part->pair_begin = next.pair_begin;
    part->pair_end = next.pair_end;
    part->request_dtype = next.request_dtype;
    part->reply_dtype = next.reply_dtype;
    call.parts.push_back(std::move(part));
    next.row_begin += num_rows;
    next.pair_begin = next.pair_end;
  }
  return ok();
}

void Engine::pump() {
  for (const auto& worker : workers_) {
    if (!worker->is_lost) send_waiting(*worker);
  }
}

void Engine::send_waiting(WorkerEnd& worker) {
  while (!worker.is_lost && !worker.waiting.empty()) {
    const auto slot = worker.acquire();
    if (!slot) return;
    Part& part = *worker.waiting.front();
    worker.waiting.pop_front();
    if (!send(worker, part, *slot)) return;
  }
}

// False when the worker was lost over it.
bool Engine::send(WorkerEnd& worker, Part& part, uint32_t slot) {
  if (is_profiling_) part.trace.encode_start_ns = now_ns();
  auto message_bytes = encode_request(part, worker.link.generation, worker.link.channel->outgoing(slot));
  if (!message_bytes.ok()) {
    fail(*part.call, std::move(message_bytes).error());
    return true;
  }
  const LayerPlan& plan = part.call->layer->plan;
  Counters& counters = worker.counters[plan.layer];
  ++counters.calls;
  counters.rows += part.num_rows();
  counters.pairs += part.num_pairs();
  counters.request_bytes += message_bytes.value();
  counters.floor_bytes += wire::floor_bytes(part.num_rows(), part.num_pairs(), plan.in_size, part.request_dtype, plan.out_size,
                                            part.reply_dtype);
  part.state = PartState::kInFlight;
  worker.put_in_flight(slot, &part, now_ns());
  Status published = worker.link.channel->publish(slot, message_bytes.value());
  if (!published.ok()) {
    lose(worker, published.error().code, published.error().message);
    return false;
  }
  if (is_profiling_) part.trace.published_ns = now_ns();
  return true;
}

void Engine::drive(Deadline tick, int wake_fd) {
  const int64_t began = now_ns();
  Deadline until = tick.earlier(Deadline::at_ns(began + kTickNs));
  for (const CallPtr& call : calls_) until = until.earlier(Deadline::at_ns(call->deadline_ns));
  for (size_t i = 0; i < workers_.size(); ++i) {
    wait_entries_[i].channel = workers_[i]->is_listening() ? workers_[i]->link.channel.get() : nullptr;
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

// Takes what else has arrived; bounded by the credits.
void Engine::drain(WorkerEnd& worker) {
  while (!worker.is_lost && worker.is_listening()) {
    auto polled = worker.link.channel->poll();
    if (!polled.ok()) return lose(worker, polled.error().code, polled.error().message);
    if (!polled.value()) return;
    receive(worker, *polled.value());
  }
}

void Engine::receive(WorkerEnd& worker, transport::Arrival arrival) {
  if (arrival.bytes.size() < wire::kFrameHeaderBytes || arrival.slot >= worker.slots.size()) {
    return lose(worker, ErrorCode::kProtocol, "sent a message that is no frame");
  }
  std::byte copied[wire::kFrameHeaderBytes];  // the worker can still write the slot: decode a private copy
  std::copy_n(arrival.bytes.data(), sizeof copied, copied);
  const auto decoded = wire::decode_frame_header(copied);
  if (!decoded.ok()) return lose(worker, ErrorCode::kProtocol, "sent a malformed frame: " + decoded.error().message);
  const wire::FrameHeader& header = decoded.value();
  if (header.generation != worker.link.generation ||
      arrival.bytes.size() != wire::kFrameHeaderBytes + uint64_t{header.payload_bytes}) {
    return lose(worker, ErrorCode::kProtocol, "sent a frame of another generation or length");
  }
  const Slot& slot = worker.slots[arrival.slot];
  if (slot.quarantine) return receive_late(worker, arrival.slot, header);
  if (slot.part == nullptr) return lose(worker, ErrorCode::kProtocol, "answered where nothing was asked");
  const Part& part = *slot.part;
  const ShardPlace& shard = part.call->layer->plan.shards[part.shard_index];
  if (header.call_id != part.call->id || header.layer != part.call->layer->plan.layer || header.shard != shard.shard ||
      header.slice != part.slice || header.attempt != 0 || header.weights_fingerprint != shard.weights_fingerprint) {
    return lose(worker, ErrorCode::kProtocol, "answered another call than the one asked in that slot");
  }
  if (header.kind == wire::FrameKind::kError) return receive_error(worker, arrival.slot, header, arrival.bytes);
  if (header.kind != wire::FrameKind::kReply) return lose(worker, ErrorCode::kProtocol, "sent a request to the host");
  receive_rows(worker, arrival.slot, header, arrival.bytes);
}

// The reply of a call that ended before: it frees its slot and touches nothing else.
void Engine::receive_late(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header) {
  const Quarantine& expected = *worker.slots[slot].quarantine;
  if (header.call_id != expected.call_id || header.layer != expected.layer || header.shard != expected.shard ||
      header.slice != expected.slice) {
    return lose(worker, ErrorCode::kProtocol, "answered another call than the one asked in that slot");
  }
  ++worker.stale_replies;
  worker.release(slot);
}

void Engine::receive_error(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header, std::span<const std::byte> bytes) {
  std::byte text[wire::kMaxErrorPayloadBytes];
  const size_t num_bytes = header.payload_bytes;
  if (num_bytes > sizeof text) return lose(worker, ErrorCode::kProtocol, "sent an error text over its limit");
  std::copy_n(bytes.data() + wire::kFrameHeaderBytes, num_bytes, text);
  const auto decoded = wire::decode_error({text, num_bytes});
  if (!decoded.ok() || checksum({text, num_bytes}) != header.payload_checksum) {
    return lose(worker, ErrorCode::kProtocol, "sent a malformed error");
  }
  Call& call = *worker.slots[slot].part->call;
  worker.counters[call.layer->plan.layer].reply_bytes += bytes.size();
  worker.release(slot);
  const ErrorCode code = decoded.value().code == ErrorCode::kRange ? ErrorCode::kRange : ErrorCode::kWorkerFailed;
  fail(call, Error{code, "worker " + worker.link.name + ", layer " + call.layer->plan.name + ": " + decoded.value().text});
}

void Engine::receive_rows(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header, std::span<const std::byte> bytes) {
  Part& part = *worker.slots[slot].part;
  Call& call = *part.call;
  const uint32_t out_size = call.layer->plan.out_size;
  const auto layout = wire::ReplyLayout::of(part.num_rows(), out_size, part.reply_dtype);
  if (!layout.ok() || header.num_rows != part.num_rows() || header.num_pairs != part.num_pairs() ||
      header.request_dtype != part.request_dtype || header.reply_dtype != part.reply_dtype ||
      header.payload_bytes != layout.value().payload_bytes) {
    return lose(worker, ErrorCode::kProtocol, "sent a reply of another shape than the request's");
  }
  // Copied once, checksummed in the same pass, and only then believed: the worker may write the slot at any time.
  const std::span<const std::byte> payload = bytes.subspan(wire::kFrameHeaderBytes);
  const size_t rows_bytes = payload.size() - wire::kReplyTimingBytes;
  std::byte timing_bytes[wire::kReplyTimingBytes];
  part.reply_rows = take_buffer(rows_bytes);
  Checksum sum;
  copy_and_checksum(payload.first(wire::kReplyTimingBytes), timing_bytes, sum);
  copy_and_checksum(payload.subspan(wire::kReplyTimingBytes), part.reply_rows.data(), sum);
  std::byte again[wire::kFrameHeaderBytes];
  std::copy_n(bytes.data(), sizeof again, again);
  const auto reread = wire::decode_frame_header(again);
  if (sum.finish() != header.payload_checksum || !reread.ok() || reread.value().call_id != header.call_id ||
      reread.value().generation != header.generation || reread.value().slice != header.slice) {
    return lose(worker, ErrorCode::kProtocol, "sent a reply whose checksum does not match");
  }
  const wire::ReplyTiming timing = wire::decode_reply_timing(timing_bytes);
  Counters& counters = worker.counters[call.layer->plan.layer];
  counters.reply_bytes += bytes.size();
  counters.worker_compute_ns += timing.finished_ns - timing.started_ns;
  counters.worker_queue_ns += timing.started_ns - timing.received_ns;
  if (is_profiling_) {
    part.trace.arrived_ns = now_ns();
    part.trace.worker_received_ns = timing.received_ns;
    part.trace.worker_started_ns = timing.started_ns;
    part.trace.worker_finished_ns = timing.finished_ns;
  }
  part.state = PartState::kArrived;
  worker.release(slot);
  if (--call.parts_left == 0) finish(call);
}

void Engine::finish(Call& call) {
  Status combined = combine(call);
  if (!combined.ok()) call.error = std::move(combined).error();
  call.is_done = true;
  for (const auto& part : call.parts) {
    if (is_profiling_ && traces_.size() < kMaxTraces) {
      SliceTrace trace = part->trace;
      trace.call_id = call.id;
      trace.layer = call.layer->plan.layer;
      trace.shard = call.layer->plan.shards[part->shard_index].shard;
      trace.worker = part->worker;
      trace.slice = part->slice;
      trace.num_rows = part->num_rows();
      trace.combined_ns = now_ns();
      traces_.push_back(trace);
    }
    if (spare_buffers_.size() < kMaxSpareBuffers) spare_buffers_.push_back(std::move(part->reply_rows));
  }
  std::erase_if(calls_, [&call](const CallPtr& one) { return one.get() == &call; });
}

void Engine::fail(Call& call, Error error) {
  if (call.is_done) return;
  call.error = std::move(error);
  call.is_done = true;
  for (const auto& worker : workers_) {
    std::erase_if(worker->waiting, [&call](const Part* part) { return part->call == &call; });
    for (uint32_t slot = 0; slot < worker->slots.size(); ++slot) {
      const Part* part = worker->slots[slot].part;
      if (part != nullptr && part->call == &call) worker->quarantine(slot);
    }
  }
  std::erase_if(calls_, [&call](const CallPtr& one) { return one.get() == &call; });
}

void Engine::lose(WorkerEnd& worker, ErrorCode code, const std::string& reason) {
  if (worker.is_lost) return;
  std::vector<CallPtr> ended;
  for (const CallPtr& call : calls_) {
    const bool needs_it = std::any_of(call->parts.begin(), call->parts.end(), [&](const auto& part) {
      return workers_[part->worker].get() == &worker && part->state != PartState::kArrived;
    });
    if (needs_it) ended.push_back(call);
  }
  for (const CallPtr& call : ended) {
    fail(*call, Error{code, "worker " + worker.link.name + " was lost: " + reason + " (layer " + call->layer->plan.name + ")"});
  }
  worker.close(reason);
}

void Engine::judge_all(int64_t now) {
  last_judged_ns_ = now;
  for (const auto& worker : workers_) {
    if (worker->is_lost) continue;
    if (!worker->judge(now, options_.stall_timeout_ns)) continue;
    drain(*worker);  // a reply that already arrived wins
    if (worker->is_lost) continue;
    if (const auto failure = worker->judge(now, options_.stall_timeout_ns)) {
      lose(*worker, ErrorCode::kWorkerLost, *failure);
    }
  }
}

void Engine::end_late_calls(int64_t now) {
  std::vector<CallPtr> late;
  for (const CallPtr& call : calls_) {
    if (now >= call->deadline_ns) late.push_back(call);
  }
  for (const CallPtr& call : late) {
    const auto owed = std::find_if(call->parts.begin(), call->parts.end(), [](const auto& part) {
      return part->state != PartState::kArrived;
    });
    const WorkerEnd& worker = *workers_[(*owed)->worker];
    fail(*call, Error{ErrorCode::kTimeout, "worker " + worker.link.name + " did not answer layer " + call->layer->plan.name + " within " +
                                               seconds_text(options_.call_timeout_ns) +
                                               "; raise ipc.call_timeout_s if it is only slow"});
  }
}

void Engine::charge_wait(int64_t elapsed_ns) {
  for (const auto& worker : workers_) {
    if (worker->owes()) worker->counters[worker->last_layer].wait_ns += elapsed_ns;
  }
}

std::vector<std::byte> Engine::take_buffer(size_t num_bytes) {
  std::vector<std::byte> buffer;
  if (!spare_buffers_.empty()) {
    buffer = std::move(spare_buffers_.back());
    spare_buffers_.pop_back();
  }
  buffer.resize(num_bytes);
  return buffer;
}

}  // namespace dflash::client
