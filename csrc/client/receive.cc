// Takes answers apart. What is judged is always a private copy: the worker may still write the
// slot.
// SPDX-License-Identifier: Apache-2.0
#include "client/receive.h"

#include <algorithm>
#include <array>

#include "base/checksum.h"
#include "wire/frame.h"

namespace dflash::client {
namespace {

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

Result<wire::RemoteError> take_refusal(const wire::FrameHeader& header,
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
Result<wire::ReplyTiming> take_rows(const Path& path, const wire::FrameHeader& header,
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

Result<Answer> take_answer(const Path& path, const transport::Arrival& arrival,
                           BufferPool& buffers) {
  const auto header = take_header(path, arrival.bytes);
  if (!header.ok()) return header.error();
  const Slot* slot = path.slot(arrival.slot);
  if (slot == nullptr) return broken("sent a message in a slot that does not exist");
  const Attempt& attempt = slot->attempt;
  Answer answer{arrival.slot, arrival.bytes.size(), attempt, false, std::nullopt, {}};
  if (attempt.slice == nullptr && !slot->quarantine)
    return broken("answered where nothing was asked");
  if (attempt.slice == nullptr ? !answers(header.value(), *slot->quarantine)
                               : !answers(header.value(), attempt)) {
    return broken("answered another call than the one asked in that slot");
  }
  if (attempt.slice == nullptr) {
    answer.is_superseded = slot->quarantine->is_superseded;
    return answer;
  }
  if (header.value().kind == wire::FrameKind::kError) {
    auto refusal = take_refusal(header.value(), arrival.bytes.subspan(wire::kFrameHeaderBytes));
    if (!refusal.ok()) return std::move(refusal).error();
    answer.refusal = std::move(refusal).value();
    return answer;
  }
  if (header.value().kind != wire::FrameKind::kReply) return broken("sent a request to the host");
  const auto timing = take_rows(path, header.value(), attempt, arrival.bytes, buffers);
  if (!timing.ok()) return timing.error();
  answer.timing = timing.value();
  return answer;
}

}  // namespace dflash::client
