// Encoding writes a request front to back into its slot and checksums each block while it is still
// in the cache; the header comes last, because it carries the checksum.
// SPDX-License-Identifier: Apache-2.0
#include "client/sending.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/dtype.h"
#include "base/float_mode.h"
#include "wire/frame.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "index arrays are copied to the wire as they lie in memory");

// What was just written is checksummed in blocks of this size, while it is in the first-level
// cache. It is half of the smallest usual one.
constexpr size_t kBlockBytes = 16 << 10;

// Feeds a growing payload to the checksum, in multiples of 32 bytes as that demands.
class RunningChecksum {
 public:
  explicit RunningChecksum(const std::byte* payload) : payload_(payload) {}

  void written_to(size_t end) {
    if (end - fed_ < kBlockBytes) return;
    const size_t aligned = (end - fed_) / 32 * 32;
    sum_.update({payload_ + fed_, aligned});
    fed_ += aligned;
  }
  uint32_t finish(size_t end) {
    sum_.update({payload_ + fed_, end - fed_});
    return sum_.finish();
  }

 private:
  const std::byte* payload_;
  size_t fed_ = 0;
  Checksum sum_;
};

void write_index(const Slice& slice, const ShardRows& rows, const wire::RequestLayout& layout,
                 std::byte* payload) {
  const size_t pairs = slice.num_pairs(), num_rows = slice.num_rows();
  std::memcpy(payload + layout.weights_offset, rows.weights.data() + slice.pair_begin,
              pairs * sizeof(float));
  std::memcpy(payload + layout.row_counts_offset, rows.row_counts.data() + slice.row_begin,
              num_rows * sizeof(uint16_t));
  std::memcpy(payload + layout.local_ids_offset, rows.local_expert_ids.data() + slice.pair_begin,
              pairs * sizeof(uint16_t));
  const size_t index_end = layout.local_ids_offset + pairs * sizeof(uint16_t);
  std::memset(payload + index_end, 0, layout.rows_offset - index_end);
}

wire::FrameHeader header_of(const Slice& slice, uint16_t attempt, uint64_t generation) {
  const ShardPlace& shard = slice.call->layer->plan.shards[slice.shard_index];
  wire::FrameHeader header;
  header.kind = wire::FrameKind::kRequest;
  header.request_dtype = slice.request_dtype;
  header.reply_dtype = slice.reply_dtype;
  header.generation = generation;
  header.call_id = slice.call->id;
  header.weights_fingerprint = shard.weights_fingerprint;
  header.layer = slice.call->layer->plan.layer;
  header.shard = shard.shard;
  header.num_rows = slice.num_rows();
  header.num_pairs = slice.num_pairs();
  header.slice = slice.index;
  header.attempt = attempt;
  return header;
}

// Writes the whole request of `slice`, its `attempt`th, into `slot` and returns its length. Errors:
// kRange naming layer and token where a finite hidden state does not fit the wire dtype.
Result<size_t> encode_request(const Slice& slice, uint16_t attempt, uint64_t generation,
                              std::span<std::byte> slot) {
  const CanonicalFloatMode mode;  // some processors narrow as that mode says
  const LayerPlan& plan = slice.call->layer->plan;
  const TokenBatch& batch = slice.call->work->batch;
  const ShardRows& rows = slice.call->work->shard_rows[slice.shard_index];
  auto layout = wire::RequestLayout::of(slice.num_rows(), slice.num_pairs(), plan.in_size,
                                        slice.request_dtype);
  if (!layout.ok()) return std::move(layout).error();
  const size_t message_bytes = wire::kFrameHeaderBytes + layout.value().payload_bytes;
  if (message_bytes > slot.size())
    return Error{ErrorCode::kInvalidArgument, "a request is larger than its slot"};

  std::byte* payload = slot.data() + wire::kFrameHeaderBytes;
  write_index(slice, rows, layout.value(), payload);
  RunningChecksum sum(payload);
  const size_t row_bytes = plan.in_size * dtype_bytes(slice.request_dtype);
  size_t at = layout.value().rows_offset;
  for (uint32_t row = slice.row_begin; row < slice.row_end; ++row, at += row_bytes) {
    const uint32_t token = rows.tokens[row];
    const std::byte* source =
        batch.hidden_states + static_cast<int64_t>(token) * batch.row_stride_bytes;
    if (!convert(batch.dtype, source, slice.request_dtype, payload + at, plan.in_size)) {
      return Error{ErrorCode::kRange, "layer " + plan.name + ", token " + std::to_string(token) +
                                          ": a finite hidden state does not fit the wire dtype " +
                                          dtype_name(slice.request_dtype) +
                                          "; set ipc.dtype (DFLASH_MOE_EXPERT_COMPUTE_IPC_DTYPE) "
                                          "to one with a wider range: f32 always fits"}
          .at({{}, plan.layer, token, {}});
    }
    sum.written_to(at + row_bytes);
  }
  wire::FrameHeader header = header_of(slice, attempt, generation);
  header.payload_bytes = static_cast<uint32_t>(layout.value().payload_bytes);
  header.payload_checksum = sum.finish(layout.value().payload_bytes);
  wire::encode_frame_header(header, slot.first<wire::kFrameHeaderBytes>());
  return message_bytes;
}

}  // namespace

// Sends one slice per worker and round, so that every worker starts before any gets its second. In
// each round the worker with the longest predicted work comes first, because encoding for the
// others would delay it.
std::optional<BrokenLink> Sending::pump() {
  for (bool has_sent = true; has_sent;) {
    has_sent = false;
    order_.clear();
    for (const auto& link : crew_.links) {
      if (!link->path.is_lost() && !link->waiting.empty()) order_.push_back(link.get());
    }
    std::stable_sort(order_.begin(), order_.end(), [](const Link* a, const Link* b) {
      return a->waiting.forecast_ns() > b->waiting.forecast_ns();
    });
    for (Link* link : order_) {
      if (link->waiting.empty()) continue;  // a call has ended meanwhile
      const auto slot = link->path.free_slot(link->window);
      if (!slot) continue;
      Status sent = send(*link, link->waiting.take_first(), *slot, false);
      if (!sent.ok()) return BrokenLink{link, std::move(sent).error()};
      has_sent = true;
    }
  }
  return std::nullopt;
}

Status Sending::send(Link& link, Slice& slice, uint32_t slot, bool is_hedge) {
  Attempt attempt{&slice, slice.num_attempts, is_hedge, !link.path.is_listening()};
  attempt.encode_start_ns = now_ns();
  auto message_bytes = encode_request(slice, attempt.number, link.path.generation(),
                                      link.path.channel()->outgoing(slot));
  if (!message_bytes.ok()) {
    calls_.fail(*slice.call, std::move(message_bytes).error().at({link.name, {}, {}, slot}));
    return ok();
  }
  const LayerPlan& plan = slice.call->layer->plan;
  slice.state = SliceState::kInFlight;
  ++slice.num_attempts;
  ++slice.num_in_flight;
  attempt.request_bytes = message_bytes.value();
  attempt.published_ns = now_ns();
  attempt.asked_ns = crew_.clock.at(attempt.published_ns);
  const int64_t of_own = link.path.forecast_ns() + slice.forecast_ns;
  const int64_t predicted = of_own + link.behind_ns();  // no worker is late for its other hosts
  attempt.limit_ns = calls_.limit_ns(predicted);
  if (of_own > 0) {
    attempt.patience_ns = std::max(kLeastPatienceNs, kLatePatience * predicted);
    if (late_watch_.is_on() && !slice.is_hedged)
      late_watch_.look_by(attempt.asked_ns + attempt.patience_ns);
  }
  link.ask(slot, attempt);
  link.last_layer = plan.layer;
  Counters& counters = link.counters[plan.layer];
  DFLASH_TRY(link.path.channel()->publish(slot, message_bytes.value()));
  if (is_hedge) {
    ++counters.hedges;
    counters.hedge_request_bytes += message_bytes.value();
    return ok();
  }
  ++counters.calls;
  counters.rows += slice.num_rows();
  counters.pairs += slice.num_pairs();
  counters.request_bytes += message_bytes.value();
  counters.floor_bytes += wire::floor_bytes(slice.num_rows(), slice.num_pairs(), plan.in_size,
                                            slice.request_dtype, plan.out_size, slice.reply_dtype);
  return ok();
}

}  // namespace dflash::client
