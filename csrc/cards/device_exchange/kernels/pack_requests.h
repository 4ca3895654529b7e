// Packs the requests of a call, byte for byte as the client on the processor encodes them, from the
// call's tensors to the workers' slots: a block per worker. A request is put together in device
// memory, because its counts, ids and checksum take several passes and the device reads the slot
// over the bus slowly; then it is stored to the slot in one go, and the ring's head is released.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/kernels/frame_fields.h"
#include "cards/device_exchange/kernels/step_failures.h"
#include "cards/kernels/block_sums.h"
#include "cards/kernels/convert_floats.h"
#include "transport/ring/ring_words.h"
#include "wire/payload_layout.h"

namespace dflash::device_exchange {

static_assert(kSumThreads == kStepThreads, "sum_before() sums over a whole block");

// The expert of pair k of a token: the place of its shard << 16 | its local id, or kNoExpert for
// the id past the last expert, which is a sentinel. Another id that is no expert fails the step.
GPU_FN uint32_t expert_of(const StepParams& params, uint32_t token, uint32_t k) {
  const uint32_t at = token * params.top_k + k;
  const int64_t id = params.ids_are_64bit ? static_cast<const int64_t*>(params.topk_ids)[at]
                                          : static_cast<const int32_t*>(params.topk_ids)[at];
  if (id >= 0 && id < static_cast<int64_t>(params.num_experts)) return params.experts[id];
  if (id != static_cast<int64_t>(params.num_experts))
    fail_step(*params.state, ErrorCode::kInvalidArgument, 0, params.call_index, token);
  return kNoExpert;
}
GPU_FN float weight_of(const StepParams& params, uint32_t token, uint32_t k) {
  const uint32_t at = token * params.top_k + k;
  if (params.weights_dtype == Dtype::kF32)
    return static_cast<const float*>(params.topk_weights)[at];
  return widen_16(params.weights_dtype, static_cast<const uint16_t*>(params.topk_weights)[at]);
}

// Writes a token's pairs of the shard at `place` from `first_pair` on, ascending by local id and
// equal ids in top-k order.
GPU_FN void write_pairs(const StepParams& params, uint32_t place, uint32_t token,
                        uint32_t first_pair, float* weights, uint16_t* ids) {
  for (uint32_t k = 0; k < params.top_k; ++k) {
    const uint32_t expert = expert_of(params, token, k);
    if (expert == kNoExpert || expert >> 16 != place) continue;
    uint32_t rank = 0;
    for (uint32_t other = 0; other < params.top_k; ++other) {
      const uint32_t its = expert_of(params, token, other);
      if (its != kNoExpert && its >> 16 == place && (its < expert || (its == expert && other < k)))
        ++rank;
    }
    weights[first_pair + rank] = weight_of(params, token, k);
    ids[first_pair + rank] = static_cast<uint16_t>(expert & 0xffffu);
  }
}

// Writes one element of a token's row in the request's dtype; false where a finite value does not
// fit.
GPU_FN bool convert_element(const StepParams& params, uint32_t token, uint32_t column,
                            unsigned char* to) {
  const unsigned char* row =
      static_cast<const unsigned char*>(params.hidden_states) + token * params.row_stride_bytes;
  if (params.dtype == Dtype::kF32) {
    const uint32_t bits = reinterpret_cast<const uint32_t*>(row)[column];
    if (params.request_dtype == Dtype::kF32) {
      *reinterpret_cast<uint32_t*>(to) = bits;
      return true;
    }
    const float value = float_of(bits);
    const uint32_t narrow =
        params.request_dtype == Dtype::kF16 ? narrow_f16(value) : narrow_bf16(value);
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(narrow);
    return !is_finite(value) || is_finite(widen_16(params.request_dtype, narrow));
  }
  const uint32_t half = reinterpret_cast<const uint16_t*>(row)[column];
  if (params.request_dtype == params.dtype) {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(half);
    return true;
  }
  const float value = widen_16(params.dtype, half);
  if (params.request_dtype == Dtype::kF32) {
    *reinterpret_cast<uint32_t*>(to) = bits_of(value);
    return true;
  }
  const uint32_t narrow =
      params.request_dtype == Dtype::kF16 ? narrow_f16(value) : narrow_bf16(value);
  *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(narrow);
  return !is_finite(value) || is_finite(widen_16(params.request_dtype, narrow));
}

// Writes the rows of a message. All threads of the block.
GPU_FN void write_rows(const StepParams& params, uint32_t place, uint32_t num_rows,
                       unsigned char* rows, StepScratch& scratch) {
  const uint64_t size = dtype_bytes(params.request_dtype);
  const uint32_t count = num_rows * params.in_size;
  for (uint32_t i = thread_index(); i < count; i += kStepThreads) {
    const uint32_t token = scratch.tokens.at(i / params.in_size);
    if (convert_element(params, token, i % params.in_size, rows + i * size)) continue;
    fail_step(*params.state, ErrorCode::kRange, place, params.call_index, token);
  }
}

// Writes the header except for its own checksum. Thread 0 calls it.
GPU_FN void write_header(const StepParams& params, uint32_t place, const StepMessage& message,
                         uint32_t payload_checksum, unsigned char* header) {
  const StepShard& shard = params.shards[place];
  store_field(header, frame_offset::kMagic, wire::kFrameMagic);
  store_field(header, frame_offset::kVersion, wire::kFrameVersion);
  store_field(header, frame_offset::kKind, wire::FrameKind::kRequest);
  store_field(header, frame_offset::kRequestDtype, params.request_dtype);
  store_field(header, frame_offset::kReplyDtype, params.reply_dtype);
  store_field(header, frame_offset::kGeneration, params.lanes[shard.lane].generation);
  store_field(header, frame_offset::kCallId, params.state->first_call + params.call_index);
  store_field(header, frame_offset::kWeightsFingerprint, shard.weights_fingerprint);
  store_field(header, frame_offset::kLayer, params.layer);
  store_field(header, frame_offset::kShard, shard.shard);
  store_field(header, frame_offset::kNumRows, message.num_rows);
  store_field(header, frame_offset::kNumPairs, message.num_pairs);
  store_field(header, frame_offset::kPayloadBytes,
              message.request_bytes - static_cast<uint32_t>(wire::kFrameHeaderBytes));
  store_field(header, frame_offset::kPayloadChecksum, payload_checksum);
  store_field(header, frame_offset::kSlice, uint16_t{0});
  store_field(header, frame_offset::kAttempt, uint16_t{0});
}

// Completes the message and stores it to the slot of its shard; only the release of the ring's head
// is left. All threads of the block.
GPU_FN void store_message(const StepParams& params, uint32_t place, const StepMessage& message,
                          StepScratch& scratch) {
  constexpr uint32_t kHeaderBytes = wire::kFrameHeaderBytes;
  unsigned char* built = params.outgoing + place * params.outgoing_stride;
  const uint32_t sum =
      block_checksum(built + kHeaderBytes, message.request_bytes - kHeaderBytes, scratch.sum);
  if (thread_index() == 0) write_header(params, place, message, sum, built);
  sync_block();
  const uint32_t header_sum = block_checksum(built, wire::kCheckedHeaderBytes, scratch.sum);
  if (thread_index() == 0) store_field(built, frame_offset::kHeaderChecksum, header_sum);
  sync_block();
  const StepLane& lane = params.lanes[params.shards[place].lane];
  copy_units(lane.requests + lane.request_slots + params.shards[place].slot * lane.request_stride,
             built, message.request_bytes);
  fence_system();
  sync_block();
}

// Writes the ring's entry, then releases its head. Thread 0 calls it. The entry is written in words
// of 32 bits; the length's upper word and the zero between slot and length are the same value.
GPU_FN void publish_message(StepLane& lane, uint32_t slot, uint32_t num_bytes) {
  unsigned char* entry =
      lane.requests + transport::kEntriesOffset +
      (lane.head / transport::kOneMessage & lane.entry_mask) * transport::kEntryBytes;
  for (uint32_t at = 0; at < transport::kEntryBytes; at += sizeof(uint32_t)) {
    *reinterpret_cast<volatile uint32_t*>(entry + at) = at == transport::kEntrySlotOffset ? slot
                                                        : at == transport::kEntryLengthOffset
                                                            ? num_bytes
                                                            : 0u;
  }
  fence_system();
  lane.head += transport::kOneMessage;
  store_release_system(reinterpret_cast<uint32_t*>(lane.requests + transport::kHeadOffset),
                       lane.head);
}

// Packs and publishes what the call has for one shard, if anything. All threads of the block.
GPU_FN void pack_shard(const StepParams& params, uint32_t place, SubgroupSums& sums,
                       StepScratch& scratch) {
  const uint32_t token = thread_index();
  uint32_t count = 0;
  for (uint32_t k = 0; token < params.num_tokens && k < params.top_k; ++k) {
    const uint32_t expert = expert_of(params, token, k);
    count += expert != kNoExpert && expert >> 16 == place ? 1u : 0u;
  }
  StepMessage message;
  const uint32_t row = sum_before(count != 0 ? 1u : 0u, message.num_rows, sums);
  const uint32_t first_pair = sum_before(count, message.num_pairs, sums);
  const wire::RequestOffsets at = wire::request_offsets(message.num_rows, message.num_pairs,
                                                        params.in_size, params.request_dtype);
  const wire::ReplyOffsets reply =
      wire::reply_offsets(message.num_rows, params.out_size, params.reply_dtype);
  message.request_bytes = static_cast<uint32_t>(wire::kFrameHeaderBytes + at.payload_bytes);
  message.reply_bytes = static_cast<uint32_t>(wire::kFrameHeaderBytes + reply.payload_bytes);
  unsigned char* payload =
      params.outgoing + place * params.outgoing_stride + wire::kFrameHeaderBytes;
  if (token < params.num_tokens)
    params.row_places[place * kMostStepTokens + token] =
        count != 0 ? static_cast<uint16_t>(row) : kNoRow;
  if (count != 0) {
    scratch.tokens.at(row) = token;
    reinterpret_cast<uint16_t*>(payload + at.row_counts_offset)[row] = static_cast<uint16_t>(count);
    write_pairs(params, place, token, first_pair,
                reinterpret_cast<float*>(payload + at.weights_offset),
                reinterpret_cast<uint16_t*>(payload + at.local_ids_offset));
  }
  for (uint64_t i = at.index_bytes + thread_index(); i < at.rows_offset; i += kStepThreads)
    payload[i] = 0;
  if (thread_index() == 0) params.messages[place] = message;
  sync_block();
  if (message.num_rows == 0) return;  // the whole block
  write_rows(params, place, message.num_rows, payload + at.rows_offset, scratch);
  sync_block();
  if (has_step_failed(*params.state, scratch)) {
    if (thread_index() == 0) params.messages[place].num_rows = 0;
    return;
  }
  store_message(params, place, message, scratch);
  if (thread_index() == 0)
    publish_message(params.lanes[params.shards[place].lane], params.shards[place].slot,
                    message.request_bytes);
}

// A block per worker, which packs that worker's shards one after the other.
GPU_PAIRED_KERNEL(dflash_pack_requests, StepParams, kStepThreads) {
  GPU_SHARED(SubgroupSums, sums);
  GPU_SHARED(StepScratch, scratch);
  fill_crc_table(scratch.sum);
  if (params.call_index == 0 && block_x() == 0 && thread_index() == 0)
    params.state->started_ns = device_ns();
  const bool has_failed = has_step_failed(*params.state, scratch);
  for (uint32_t place = 0; place < params.num_shards; ++place) {
    if (params.shards[place].lane != block_x()) continue;
    if (!has_failed)
      pack_shard(params, place, sums, scratch);
    else if (thread_index() == 0)
      params.messages[place].num_rows = 0;
  }
}

}  // namespace dflash::device_exchange
