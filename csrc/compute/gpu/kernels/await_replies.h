// Waits for the replies of a call, a block per worker, and takes each exactly once: copied to
// device memory, then compared with what was asked and summed there; the header is read again
// before it is believed. A wait ends with the replies, the host's word, the worker's close or the
// step's budget.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/step_failures.h"

namespace dflash::compute::gpu {

// By thread 0: 0 once a message is there, else the StepCode why none will come. The host's word is
// across the bus, as the reply is: asked seldom.
GPU_FN uint32_t await_head(const StepParams& params, const StepLane& lane) {
  const uint32_t* head = reinterpret_cast<const uint32_t*>(lane.replies + kRingHeadOffset);
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t ahead = load_acquire_system(head) - lane.tail;
    if (ahead >= kRingOneMessage) return 0;
    if (ahead != 0) return static_cast<uint32_t>(StepCode::kWorkerLost);  // closed
    if (load_volatile(&params.state->error) != 0) return static_cast<uint32_t>(StepCode::kClosed);
    if (turn % 16 == 0 && load_acquire_system(params.abort) != 0)
      return static_cast<uint32_t>(StepCode::kClosed);
    if (device_ns() - params.state->started_ns > params.state->budget_ns)
      return static_cast<uint32_t>(StepCode::kTimeout);
  }
}

// The place of this worker's shard that the message in `slot` answers; num_shards: none.
GPU_FN uint32_t place_of(const StepParams& params, uint32_t lane, uint32_t slot) {
  for (uint32_t place = 0; place < params.num_shards; ++place) {
    if (params.shards[place].lane == lane && params.shards[place].slot == slot &&
        params.messages[place].num_rows != 0)
      return place;
  }
  return params.num_shards;
}

// By thread 0, of the private copy: whether the frame says what the request asked.
GPU_FN bool answers(const StepParams& params, uint32_t place, const uint32_t* header,
                    uint32_t num_bytes) {
  const StepShard& shard = params.shards[place];
  const StepMessage& message = params.messages[place];
  const uint64_t generation = params.lanes[shard.lane].generation,
                 call_id = params.state->first_call + params.call_index;
  const uint32_t kind = header[1] >> 8 & 0xffu;
  const uint32_t dtypes =
      static_cast<uint32_t>(params.request_dtype) | static_cast<uint32_t>(params.reply_dtype) << 8;
  const bool is_error = kind == kErrorKind;
  return header[0] == kFrameMagicWord && (header[1] & 0xffu) == 1u &&
         (kind == kReplyKind || is_error) && (is_error || header[1] >> 16 == dtypes) &&
         header[2] == static_cast<uint32_t>(generation) &&
         header[3] == static_cast<uint32_t>(generation >> 32) &&
         header[4] == static_cast<uint32_t>(call_id) &&
         header[5] == static_cast<uint32_t>(call_id >> 32) &&
         header[6] == static_cast<uint32_t>(shard.weights_fingerprint) &&
         header[7] == static_cast<uint32_t>(shard.weights_fingerprint >> 32) &&
         header[8] == params.layer && header[9] == shard.shard &&
         header[10] == (is_error ? 0u : message.num_rows) &&
         header[11] == (is_error ? 0u : message.num_pairs) &&
         header[12] == num_bytes - kFrameBytes && header[14] == 0 &&
         (is_error || num_bytes == message.reply_bytes);
}

// All threads: takes the message in `slot`. 0, or code << 8 | detail.
GPU_FN uint32_t take_reply(const StepParams& params, uint32_t place, uint32_t num_bytes,
                           StepScratch& scratch) {
  const StepShard& shard = params.shards[place];
  const StepLane& lane = params.lanes[shard.lane];
  const unsigned char* slot = lane.replies + lane.reply_slots + shard.slot * lane.reply_stride;
  unsigned char* copy = params.incoming + place * params.incoming_stride;
  const uint32_t protocol = static_cast<uint32_t>(StepCode::kProtocol) << 8;
  copy_units(copy, slot, num_bytes);
  sync_block();
  const uint32_t* header = reinterpret_cast<const uint32_t*>(copy);
  if (block_checksum(copy, kFrameBytes - 4, scratch.sum) != header[15])
    return protocol | static_cast<uint32_t>(StepDetail::kHeader);
  if (thread_index() == 0)
    scratch.answer.at(0) = answers(params, place, header, num_bytes) ? 1u : 0u;
  sync_block();
  // written again behind the barriers of block_checksum()
  const bool is_answer = scratch.answer.at(0) != 0;
  if (!is_answer) return protocol | static_cast<uint32_t>(StepDetail::kAnswer);
  const uint32_t sum = block_checksum(copy + kFrameBytes, num_bytes - kFrameBytes, scratch.sum);
  if (thread_index() == 0) {
    const volatile uint32_t* again = reinterpret_cast<const volatile uint32_t*>(slot);
    scratch.answer.at(0) = sum == header[13] && again[13] == header[13] && again[2] == header[2] &&
                                   again[3] == header[3]
                               ? 1u
                               : 0u;
  }
  sync_block();
  // written again behind the next turn's first barrier
  const bool is_whole = scratch.answer.at(0) != 0;
  if (!is_whole) return protocol | static_cast<uint32_t>(StepDetail::kChecksum);
  return (header[1] >> 8 & 0xffu) == kErrorKind
             ? static_cast<uint32_t>(StepCode::kWorkerFailed) << 8
             : 0u;
}

// A block per worker.
GPU_KERNEL(dflash_await_replies, StepParams, kStepThreads) {
  GPU_SHARED(StepScratch, scratch);
  fill_crc_table(scratch.sum);
  if (has_step_failed(*params.state, scratch)) return;
  StepLane& lane = params.lanes[block_x()];
  uint32_t num_owed = 0, first = 0;
  for (uint32_t place = params.num_shards; place-- > 0;) {
    if (params.shards[place].lane != block_x() || params.messages[place].num_rows == 0) continue;
    ++num_owed;
    first = place;
  }
  for (; num_owed > 0; --num_owed) {
    if (thread_index() == 0) {
      const uint32_t refused = await_head(params, lane);
      const volatile uint32_t* entry = reinterpret_cast<const volatile uint32_t*>(
          lane.replies + kRingEntriesOffset +
          (lane.tail / kRingOneMessage & lane.entry_mask) * kRingEntryBytes);
      const uint32_t slot = refused != 0 ? 0u : entry[0],
                     num_bytes = refused != 0 || entry[3] != 0 ? 0u : entry[2];
      const uint32_t place = refused != 0 ? first : place_of(params, block_x(), slot);
      const uint32_t least = kFrameBytes;
      const bool is_sound =
          place < params.num_shards && num_bytes >= least && num_bytes <= params.incoming_stride;
      scratch.answer.at(1) = refused != 0 ? refused << 8
                             : is_sound   ? 0u
                                          : static_cast<uint32_t>(StepCode::kProtocol) << 8 |
                                              static_cast<uint32_t>(StepDetail::kIndex);
      scratch.answer.at(2) = place < params.num_shards ? place : first;
      scratch.answer.at(3) = num_bytes;
    }
    sync_block();
    const uint32_t refused = scratch.answer.at(1), place = scratch.answer.at(2),
                   num_bytes = scratch.answer.at(3);
    const uint32_t failure = refused != 0 ? refused : take_reply(params, place, num_bytes, scratch);
    if (failure != 0) {
      if (thread_index() == 0)
        fail_step(*params.state, failure >> 8, place, params.call_index, failure & 0xffu);
      return;  // the whole block
    }
    if (thread_index() == 0) lane.tail += kRingOneMessage;
  }
}

}  // namespace dflash::compute::gpu
