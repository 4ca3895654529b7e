// Requests as the CPU's client encodes them, byte for byte, from a call's tensors straight to the
// workers' slots: a block per worker. They are put together in device memory, which the device
// reads fast, and stored to the slot in one go; then the head is released.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/convert_floats.h"
#include "compute/gpu/kernels/route.h"
#include "compute/gpu/kernels/step_failures.h"

namespace dflash::compute::gpu {

static_assert(kRouteThreads == kStepThreads, "sums over a block are those of route.h");

GPU_FN uint32_t dtype_size(Dtype dtype) { return dtype == Dtype::kF32 ? 4u : 2u; }
GPU_FN uint32_t align_64(uint32_t bytes) { return (bytes + 63u) / 64u * 64u; }

// Pair k of a token: its expert's place << 16 | local id; ~0: none (a sentinel). A negative id
// fails the step.
GPU_FN uint32_t expert_of(const StepParams& params, uint32_t token, uint32_t k) {
  const uint32_t at = token * params.top_k + k;
  const int64_t id = params.ids_are_64bit ? static_cast<const int64_t*>(params.topk_ids)[at]
                                          : static_cast<const int32_t*>(params.topk_ids)[at];
  if (id < 0)
    fail_step(*params.state, static_cast<uint32_t>(StepCode::kInvalidArgument), 0,
              params.call_index, token);
  return id < 0 || id >= static_cast<int64_t>(params.num_experts) ? ~0u : params.experts[id];
}
GPU_FN float weight_of(const StepParams& params, uint32_t token, uint32_t k) {
  const uint32_t at = token * params.top_k + k;
  if (params.weights_dtype == Dtype::kF32)
    return static_cast<const float*>(params.topk_weights)[at];
  return widen_16(params.weights_dtype, static_cast<const uint16_t*>(params.topk_weights)[at]);
}

// A token's pairs of shard `place` at `first_pair`: ascending by local id, equal ones in top-k
// order.
GPU_FN void write_pairs(const StepParams& params, uint32_t place, uint32_t token,
                        uint32_t first_pair, float* weights, uint16_t* ids) {
  for (uint32_t k = 0; k < params.top_k; ++k) {
    const uint32_t expert = expert_of(params, token, k);
    if (expert == ~0u || expert >> 16 != place) continue;
    uint32_t rank = 0;
    for (uint32_t other = 0; other < params.top_k; ++other) {
      const uint32_t its = expert_of(params, token, other);
      if (its != ~0u && its >> 16 == place && (its < expert || (its == expert && other < k)))
        ++rank;
    }
    weights[first_pair + rank] = weight_of(params, token, k);
    ids[first_pair + rank] = static_cast<uint16_t>(expert & 0xffffu);
  }
}

// Element i of a token's row in the request's dtype; false where a finite value does not fit.
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

GPU_FN void write_rows(const StepParams& params, uint32_t place, uint32_t num_rows,
                       unsigned char* rows, StepScratch& scratch) {
  const uint32_t size = dtype_size(params.request_dtype), count = num_rows * params.in_size;
  for (uint32_t i = thread_index(); i < count; i += kStepThreads) {
    const uint32_t token = scratch.tokens.at(i / params.in_size);
    if (convert_element(params, token, i % params.in_size, rows + uint64_t{i} * size)) continue;
    fail_step(*params.state, static_cast<uint32_t>(StepCode::kRange), place, params.call_index,
              token);
  }
}

// The header but for its own checksum, by thread 0.
GPU_FN void write_header(const StepParams& params, uint32_t place, const StepMessage& message,
                         uint32_t payload_checksum, uint32_t* header) {
  const StepShard& shard = params.shards[place];
  const uint64_t generation = params.lanes[shard.lane].generation,
                 call_id = params.state->first_call + params.call_index;
  header[0] = kFrameMagicWord;
  header[1] = 1u | kRequestKind << 8 | static_cast<uint32_t>(params.request_dtype) << 16 |
              static_cast<uint32_t>(params.reply_dtype) << 24;
  header[2] = static_cast<uint32_t>(generation);
  header[3] = static_cast<uint32_t>(generation >> 32);
  header[4] = static_cast<uint32_t>(call_id);
  header[5] = static_cast<uint32_t>(call_id >> 32);
  header[6] = static_cast<uint32_t>(shard.weights_fingerprint);
  header[7] = static_cast<uint32_t>(shard.weights_fingerprint >> 32);
  header[8] = params.layer;
  header[9] = shard.shard;
  header[10] = message.num_rows;
  header[11] = message.num_pairs;
  header[12] = message.request_bytes - kFrameBytes;
  header[13] = payload_checksum;
  header[14] = 0;  // slice, attempt
}

// Everything of the message in slot `shard.slot` but the release of the head.
GPU_FN void store_message(const StepParams& params, uint32_t place, const StepMessage& message,
                          StepScratch& scratch) {
  unsigned char* built = params.outgoing + place * params.outgoing_stride;
  const uint32_t sum =
      block_checksum(built + kFrameBytes, message.request_bytes - kFrameBytes, scratch.sum);
  uint32_t* header = reinterpret_cast<uint32_t*>(built);
  if (thread_index() == 0) write_header(params, place, message, sum, header);
  sync_block();
  const uint32_t header_sum = block_checksum(built, kFrameBytes - 4, scratch.sum);
  if (thread_index() == 0) header[15] = header_sum;
  sync_block();
  const StepLane& lane = params.lanes[params.shards[place].lane];
  copy_units(lane.requests + lane.request_slots + params.shards[place].slot * lane.request_stride,
             built, message.request_bytes);
  fence_system();
  sync_block();
}

// By thread 0: the entry, then the head.
GPU_FN void publish_message(StepLane& lane, uint32_t slot, uint32_t num_bytes) {
  unsigned char* entry = lane.requests + kRingEntriesOffset +
                         (lane.head / kRingOneMessage & lane.entry_mask) * kRingEntryBytes;
  volatile uint32_t* words = reinterpret_cast<volatile uint32_t*>(entry);
  words[0] = slot;
  words[1] = 0;
  words[2] = num_bytes;
  words[3] = 0;
  fence_system();
  lane.head += kRingOneMessage;
  store_release_system(reinterpret_cast<uint32_t*>(lane.requests + kRingHeadOffset), lane.head);
}

GPU_FN void pack_shard(const StepParams& params, uint32_t place, SubgroupSums& sums,
                       StepScratch& scratch) {
  const uint32_t token = thread_index();
  uint32_t count = 0;
  for (uint32_t k = 0; token < params.num_tokens && k < params.top_k; ++k) {
    const uint32_t expert = expert_of(params, token, k);
    count += expert != ~0u && expert >> 16 == place ? 1u : 0u;
  }
  StepMessage message;
  const uint32_t row = sum_before(count != 0 ? 1u : 0u, message.num_rows, sums);
  const uint32_t first_pair = sum_before(count, message.num_pairs, sums);
  const uint32_t counts_at = message.num_pairs * 4, ids_at = counts_at + message.num_rows * 2,
                 index_end = ids_at + message.num_pairs * 2;
  const uint32_t rows_at = align_64(index_end);
  message.request_bytes =
      kFrameBytes + rows_at + message.num_rows * params.in_size * dtype_size(params.request_dtype);
  message.reply_bytes = kFrameBytes + kTimingBytes +
                        message.num_rows * params.out_size * dtype_size(params.reply_dtype);
  unsigned char* payload = params.outgoing + place * params.outgoing_stride + kFrameBytes;
  if (token < params.num_tokens)
    params.row_places[place * kMostStepTokens + token] =
        count != 0 ? static_cast<uint16_t>(row) : kNoRow;
  if (count != 0) {
    scratch.tokens.at(row) = token;
    reinterpret_cast<uint16_t*>(payload + counts_at)[row] = static_cast<uint16_t>(count);
    write_pairs(params, place, token, first_pair, reinterpret_cast<float*>(payload),
                reinterpret_cast<uint16_t*>(payload + ids_at));
  }
  for (uint32_t at = index_end + thread_index(); at < rows_at; at += kStepThreads) payload[at] = 0;
  if (thread_index() == 0) params.messages[place] = message;
  sync_block();
  if (message.num_rows == 0) return;  // the whole block
  write_rows(params, place, message.num_rows, payload + rows_at, scratch);
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

// A block per worker.
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

}  // namespace dflash::compute::gpu
