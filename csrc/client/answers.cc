// Takes answers apart, and books what they say. What is judged is always a private copy: the worker
// may still write the slot.
// SPDX-License-Identifier: Apache-2.0
#include "client/answers.h"

#include <algorithm>
#include <array>

#include "base/checksum.h"
#include "base/clock.h"
#include "wire/frame.h"
#include "wire/payload.h"

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

Error broken(std::string what) { return Error{ErrorCode::kProtocol, std::move(what)}; }

// Returns whether the frame names exactly the request that was sent in its slot.
bool answers(const wire::FrameHeader& header, const Attempt& attempt) {
  const Slice& slice = *attempt.slice;
  const LayerPlan& plan = slice.call->layer->plan;
  const ShardPlace& shard = plan.shards[slice.shard_index];
  return header.call_id == slice.call->id && header.layer == plan.layer &&
         header.shard == shard.shard && header.slice == slice.index &&
         header.attempt == attempt.number &&
         header.weights_fingerprint == shard.weights_fingerprint;
}

bool answers(const wire::FrameHeader& header, const Quarantine& asked) {
  return header.call_id == asked.call_id && header.layer == asked.layer &&
         header.shard == asked.shard && header.slice == asked.slice &&
         header.attempt == asked.attempt;
}

Result<wire::FrameHeader> take_header(const Path& path, std::span<const std::byte> bytes) {
  if (bytes.size() < wire::kFrameHeaderBytes) return broken("sent a message that is no frame");
  // The worker can still write the slot, so that a private copy is decoded.
  std::array<std::byte, wire::kFrameHeaderBytes> copied;
  std::copy_n(bytes.data(), copied.size(), copied.data());
  auto decoded = wire::decode_frame_header(copied);
  if (!decoded.ok()) return broken("sent a malformed frame: " + decoded.error().message);
  if (decoded.value().generation != path.generation() ||
      bytes.size() != wire::kFrameHeaderBytes + uint64_t{decoded.value().payload_bytes}) {
    return broken("sent a frame of another generation or length");
  }
  return decoded;
}

Result<wire::RemoteError> read_refusal(const wire::FrameHeader& header,
                                       std::span<const std::byte> payload) {
  std::byte text[wire::kMaxErrorPayloadBytes];
  if (payload.size() > sizeof text) return broken("sent an error text over its limit");
  std::copy_n(payload.data(), payload.size(), text);
  auto decoded = wire::decode_error({text, payload.size()});
  if (!decoded.ok() || checksum({text, payload.size()}) != header.payload_checksum)
    return broken("sent a malformed error");
  return decoded;
}

// Copies the rows of a reply, checksums them on the way, and then looks whether the header is still
// the same. If it has changed, the worker wrote a slot that it had handed over.
Result<wire::ReplyTiming> copy_rows(const Path& path, const wire::FrameHeader& header,
                                    const Attempt& attempt, std::span<const std::byte> bytes,
                                    BufferPool& buffers) {
  Slice& slice = *attempt.slice;
  const auto layout =
      wire::ReplyLayout::of(slice.num_rows(), slice.call->layer->plan.out_size, slice.reply_dtype);
  if (!layout.ok() || header.num_rows != slice.num_rows() ||
      header.num_pairs != slice.num_pairs() || header.request_dtype != slice.request_dtype ||
      header.reply_dtype != slice.reply_dtype ||
      header.payload_bytes != layout.value().payload_bytes) {
    return broken("sent a reply of another shape than the request's");
  }
  const std::span<const std::byte> payload = bytes.subspan(wire::kFrameHeaderBytes);
  std::array<std::byte, wire::kReplyTimingBytes> timing;
  slice.reply_rows = buffers.take(payload.size() - timing.size());
  Checksum sum;
  copy_and_checksum(payload.first(timing.size()), timing.data(), sum);
  copy_and_checksum(payload.subspan(timing.size()), slice.reply_rows.bytes.get(), sum);
  const auto reread = take_header(path, bytes);
  if (sum.finish() != header.payload_checksum || !reread.ok() ||
      reread.value().payload_checksum != header.payload_checksum ||
      !answers(reread.value(), attempt)) {
    buffers.give_back(std::move(slice.reply_rows));
    return broken("sent a reply whose checksum does not match");
  }
  return wire::decode_reply_timing(timing);
}

}  // namespace

Status Answers::drain(Link& link) {
  while (link.path.is_listening()) {
    auto polled = link.path.channel()->poll();
    if (!polled.ok()) return std::move(polled).error();
    if (!polled.value()) break;
    DFLASH_TRY(take(link, *polled.value()));
  }
  return ok();
}

Status Answers::take(Link& link, const transport::Arrival& arrival) {
  const auto header = take_header(link.path, arrival.bytes);
  if (!header.ok()) return header.error();
  const Slot* slot = link.path.slot(arrival.slot);
  if (slot == nullptr) return broken("sent a message in a slot that does not exist");
  if (slot->is_free()) return broken("answered where nothing was asked");
  if (slot->quarantine ? !answers(header.value(), *slot->quarantine)
                       : !answers(header.value(), slot->attempt)) {
    return broken("answered another call than the one asked in that slot");
  }
  if (slot->quarantine) {
    take_late(link, arrival.slot);
  } else if (header.value().kind == wire::FrameKind::kError) {
    auto refusal = read_refusal(header.value(), arrival.bytes.subspan(wire::kFrameHeaderBytes));
    if (!refusal.ok()) return std::move(refusal).error();
    take_refusal(link, arrival, refusal.value());
  } else if (header.value().kind == wire::FrameKind::kReply) {
    const auto timing =
        copy_rows(link.path, header.value(), slot->attempt, arrival.bytes, reply_buffers_);
    if (!timing.ok()) return timing.error();
    take_rows(link, arrival, timing.value());
  } else {
    return broken("sent a request to the host");
  }
  return ok();
}

// The call has ended before, or another holder has answered: the message frees its slot and means
// nothing else.
void Answers::take_late(Link& link, uint32_t slot) {
  const Quarantine& asked = *link.path.slot(slot)->quarantine;
  ++link.stale_replies;
  if (asked.is_superseded) ++link.counters[asked.layer].superseded;
  link.release(slot, crew_.clock);
  link.tell_if_idle();
}

// Only a range error is about the caller's numbers, and every holder would answer the same. Every
// other refusal means that host and worker disagree, or that the worker is in trouble.
void Answers::take_refusal(Link& link, const transport::Arrival& arrival,
                           const wire::RemoteError& refusal) {
  Slice& slice = *link.path.slot(arrival.slot)->attempt.slice;
  Call& call = *slice.call;
  const LayerPlan& plan = call.layer->plan;
  link.counters[plan.layer].reply_bytes += arrival.bytes.size();
  link.release(arrival.slot, crew_.clock);
  --slice.num_in_flight;
  const bool is_range = refusal.code == ErrorCode::kRange;
  Error error = Error{is_range ? ErrorCode::kRange : ErrorCode::kWorkerFailed,
                      "worker " + link.name + ", layer " + plan.name + ": " + refusal.text}
                    .at({link.name, plan.layer, {}, arrival.slot});
  link.tell_if_idle();
  if (is_range) return calls_.fail(call, std::move(error));
  ++link.counters[plan.layer].failovers;
  slice.trouble().refused_by.push_back(link.index);
  slice.trouble().add(std::move(error));
  if (slice.num_in_flight > 0) return;  // another holder is still at it
  calls_.make_homeless(slice, link);
  remedies_.rehome_all(crew_.now());
}

void Answers::take_rows(Link& link, const transport::Arrival& arrival,
                        const wire::ReplyTiming& timing) {
  const Attempt attempt = link.path.slot(arrival.slot)->attempt;
  Slice& slice = *attempt.slice;
  Call& call = *slice.call;
  Counters& counters = link.counters[call.layer->plan.layer];
  (attempt.is_hedge ? counters.hedge_reply_bytes : counters.reply_bytes) += arrival.bytes.size();
  counters.hedges_won += attempt.is_hedge ? 1 : 0;
  counters.worker_compute_ns += duration_ns(timing.started_ns, timing.finished_ns);
  counters.worker_queue_ns += duration_ns(timing.received_ns, timing.started_ns);
  slice.worker = link.index;
  slice.times = {attempt.encode_start_ns, attempt.published_ns, now_ns(),
                 timing.received_ns,      timing.started_ns,    timing.finished_ns,
                 timing.behind_ns,        attempt.found_idle};
  learn(link, attempt, arrival.bytes.size());
  slice.state = SliceState::kArrived;
  link.release(arrival.slot, crew_.clock);
  if (--slice.num_in_flight > 0) {
    for (const auto& other : crew_.links) other->supersede(slice);
    slice.num_in_flight = 0;
  }
  remedies_.earn();
  link.tell_if_idle();
  calls_.count_arrival(call);
}

// Tells the worker's model what one slice took and, with a chunk's last reply, what the whole chunk
// took.
void Answers::learn(Link& link, const Attempt& attempt, uint64_t reply_bytes) {
  const Slice& slice = *attempt.slice;
  const Call& call = *slice.call;
  const LayerPlan& plan = call.layer->plan;
  link.model.observe(plan.cost_class,
                     {slice.num_pairs(), slice.num_experts, attempt.request_bytes, reply_bytes},
                     slice.times);
  ChunkForecast& forecast = call.work->forecasts[slice.shard_index];
  if (forecast.worker != link.index || slice.times.worker_behind_ns != 0) forecast.is_alone = false;
  if (--forecast.slices_left > 0) return;
  Link& planned = *crew_.links[forecast.worker];
  --planned.num_chunks;
  if (&planned != &link) planned.tell_if_idle();  // others have answered what it was to answer
  if (!forecast.is_alone || planned.crowded_ns >= call.begun_ns || forecast.predicted.ns == 0)
    return;
  planned.model.record(plan.cost_class, call.work->batch.num_tokens, forecast.predicted,
                       static_cast<double>(slice.times.arrived_ns - call.begun_ns));
}

}  // namespace dflash::client
