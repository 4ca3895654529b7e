// How replies are taken: everything a worker sent is copied, compared with what was asked in that
// slot, and checksummed before it is believed. Whatever does not match ends the worker, never the
// host.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include "base/checksum.h"
#include "client/engine.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr uint64_t kMaxDurationNs = 3'600'000'000'000;  // an hour: beyond any deadline of a call

// A worker's clock readings are only numbers it sent: nonsense counts as nothing.
int64_t duration_ns(int64_t from, int64_t to) {
  if (to <= from) return 0;
  const uint64_t duration = static_cast<uint64_t>(to) - static_cast<uint64_t>(from);
  return duration <= kMaxDurationNs ? static_cast<int64_t>(duration) : 0;
}

bool answers(const wire::FrameHeader& header, const Part& part) {
  const LayerPlan& plan = part.call->layer->plan;
  const ShardPlace& shard = plan.shards[part.shard_index];
  return header.call_id == part.call->id && header.layer == plan.layer &&
         header.shard == shard.shard && header.slice == part.slice && header.attempt == 0 &&
         header.weights_fingerprint == shard.weights_fingerprint;
}

}  // namespace

// Takes what has arrived; bounded by the credits.
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
  // the worker can still write the slot: decode a private copy
  std::array<std::byte, wire::kFrameHeaderBytes> copied;
  std::copy_n(arrival.bytes.data(), copied.size(), copied.data());
  const auto decoded = wire::decode_frame_header(copied);
  if (!decoded.ok())
    return lose(worker, ErrorCode::kProtocol, "sent a malformed frame: " + decoded.error().message);
  const wire::FrameHeader& header = decoded.value();
  if (header.generation != worker.link.generation ||
      arrival.bytes.size() != wire::kFrameHeaderBytes + uint64_t{header.payload_bytes}) {
    return lose(worker, ErrorCode::kProtocol, "sent a frame of another generation or length");
  }
  const Slot& slot = worker.slots[arrival.slot];
  if (slot.quarantine) return receive_late(worker, arrival.slot, header);
  if (slot.part == nullptr)
    return lose(worker, ErrorCode::kProtocol, "answered where nothing was asked");
  if (!answers(header, *slot.part)) {
    return lose(worker, ErrorCode::kProtocol,
                "answered another call than the one asked in that slot");
  }
  if (header.kind == wire::FrameKind::kError)
    return receive_error(worker, arrival.slot, header, arrival.bytes);
  if (header.kind != wire::FrameKind::kReply)
    return lose(worker, ErrorCode::kProtocol, "sent a request to the host");
  receive_rows(worker, arrival.slot, header, arrival.bytes);
}

// The reply of a call that ended before: it frees its slot and touches nothing else.
void Engine::receive_late(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header) {
  const Quarantine& expected = *worker.slots[slot].quarantine;
  if (header.call_id != expected.call_id || header.layer != expected.layer ||
      header.shard != expected.shard || header.slice != expected.slice) {
    return lose(worker, ErrorCode::kProtocol,
                "answered another call than the one asked in that slot");
  }
  ++worker.stale_replies;
  worker.release(slot);
}

void Engine::receive_error(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header,
                           std::span<const std::byte> bytes) {
  std::byte text[wire::kMaxErrorPayloadBytes];
  const size_t num_bytes = header.payload_bytes;
  if (num_bytes > sizeof text)
    return lose(worker, ErrorCode::kProtocol, "sent an error text over its limit");
  std::copy_n(bytes.data() + wire::kFrameHeaderBytes, num_bytes, text);
  const auto decoded = wire::decode_error({text, num_bytes});
  if (!decoded.ok() || checksum({text, num_bytes}) != header.payload_checksum) {
    return lose(worker, ErrorCode::kProtocol, "sent a malformed error");
  }
  Call& call = *worker.slots[slot].part->call;
  worker.counters[call.layer->plan.layer].reply_bytes += bytes.size();
  worker.release(slot);
  // Only a range error is about the caller's numbers; every other refusal means that host and
  // worker disagree.
  const ErrorCode code =
      decoded.value().code == ErrorCode::kRange ? ErrorCode::kRange : ErrorCode::kWorkerFailed;
  fail(call, Error{code, "worker " + worker.link.name + ", layer " + call.layer->plan.name + ": " +
                             decoded.value().text});
}

void Engine::receive_rows(WorkerEnd& worker, uint32_t slot, const wire::FrameHeader& header,
                          std::span<const std::byte> bytes) {
  Part& part = *worker.slots[slot].part;
  Call& call = *part.call;
  const auto layout =
      wire::ReplyLayout::of(part.num_rows(), call.layer->plan.out_size, part.reply_dtype);
  if (!layout.ok() || header.num_rows != part.num_rows() || header.num_pairs != part.num_pairs() ||
      header.request_dtype != part.request_dtype || header.reply_dtype != part.reply_dtype ||
      header.payload_bytes != layout.value().payload_bytes) {
    return lose(worker, ErrorCode::kProtocol, "sent a reply of another shape than the request's");
  }
  const std::span<const std::byte> payload = bytes.subspan(wire::kFrameHeaderBytes);
  std::array<std::byte, wire::kReplyTimingBytes> timing_bytes;
  part.reply_rows = reply_buffers_.take(payload.size() - timing_bytes.size());
  Checksum sum;
  copy_and_checksum(payload.first(timing_bytes.size()), timing_bytes.data(), sum);
  copy_and_checksum(payload.subspan(timing_bytes.size()), part.reply_rows.bytes.get(), sum);
  // The header is read again: one that changed meanwhile is a worker that wrote a slot it had
  // handed over.
  std::array<std::byte, wire::kFrameHeaderBytes> again;
  std::copy_n(bytes.data(), again.size(), again.data());
  const auto reread = wire::decode_frame_header(again);
  if (sum.finish() != header.payload_checksum || !reread.ok() ||
      reread.value().payload_checksum != header.payload_checksum ||
      reread.value().generation != header.generation || !answers(reread.value(), part)) {
    return lose(worker, ErrorCode::kProtocol, "sent a reply whose checksum does not match");
  }
  const wire::ReplyTiming timing = wire::decode_reply_timing(timing_bytes);
  Counters& counters = worker.counters[call.layer->plan.layer];
  counters.reply_bytes += bytes.size();
  counters.worker_compute_ns += duration_ns(timing.started_ns, timing.finished_ns);
  counters.worker_queue_ns += duration_ns(timing.received_ns, timing.started_ns);
  part.trace.arrived_ns = now_ns();
  part.trace.worker_received_ns = timing.received_ns;
  part.trace.worker_started_ns = timing.started_ns;
  part.trace.worker_finished_ns = timing.finished_ns;
  learn(worker, part, bytes.size());
  part.state = PartState::kArrived;
  worker.release(slot);
  if (--call.work->parts_left == 0) finish(call);
}

// Tells the worker's model what one request took and, at a shard's last reply, what the whole chunk
// took.
void Engine::learn(WorkerEnd& worker, const Part& part, uint64_t reply_bytes) {
  const Call& call = *part.call;
  const LayerPlan& plan = call.layer->plan;
  const SliceTrace& t = part.trace;
  worker.model.observe(plan.cost_class,
                       {part.num_pairs(), part.num_experts, part.request_bytes, reply_bytes},
                       {t.encode_start_ns, t.published_ns, t.arrived_ns, t.worker_received_ns,
                        t.worker_started_ns, t.worker_finished_ns, part.found_idle});
  ShardForecast& forecast = call.work->forecasts[part.shard_index];
  if (--forecast.parts_left > 0) return;
  --worker.num_shard_calls;
  if (!forecast.is_alone || worker.crowded_ns >= call.submitted_ns || forecast.ns == 0) return;
  worker.model.record(plan.cost_class, call.work->batch.num_tokens,
                      static_cast<double>(forecast.ns),
                      static_cast<double>(t.arrived_ns - call.submitted_ns));
}

}  // namespace dflash::client
