// Waits for the replies of a call, a block per worker, and takes each of them exactly once. A reply
// is first copied to device memory; there it is compared with what was asked and its checksum is
// computed, and the slot's header is read again before the copy is believed, because the worker
// can write the slot at any time. A wait ends with the replies, with the host's word, when the
// worker closes its end, or when the step's budget is spent.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/device_exchange/kernels/frame_fields.h"
#include "cards/device_exchange/kernels/step_failures.h"
#include "transport/ring/ring_words.h"
#include "wire/payload_layout.h"

namespace dflash::device_exchange {

// How a wait or a reply failed, as threads of a block tell each other: 0 where it did not, else the
// code above the detail.
constexpr uint32_t reply_failure(ErrorCode code, uint32_t detail = 0) {
  return static_cast<uint32_t>(code) << 8 | detail;
}
constexpr uint32_t reply_failure(StepDetail detail) {
  return reply_failure(ErrorCode::kProtocol, static_cast<uint32_t>(detail));
}

// Waits until the worker published a message: 0 then, else why none will come. Thread 0 calls it.
// The host's word lies across the bus, as the reply does, so it is asked in one turn of 16.
GPU_FN uint32_t await_head(const StepParams& params, const StepLane& lane) {
  const uint32_t* head = reinterpret_cast<const uint32_t*>(lane.replies + transport::kHeadOffset);
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t ahead = load_acquire_system(head) - lane.tail;
    if (ahead >= transport::kOneMessage) return 0;
    if (ahead != 0) return reply_failure(ErrorCode::kWorkerLost);  // the worker closed its end
    if (load_volatile(&params.state->error) != 0) return reply_failure(ErrorCode::kClosed);
    if (turn % 16 == 0 && load_acquire_system(params.abort) != 0)
      return reply_failure(ErrorCode::kClosed);
    if (device_ns() - params.state->started_ns > params.state->budget_ns)
      return reply_failure(ErrorCode::kTimeout);
  }
}

// The place of the shard of this worker that a message in `slot` answers; num_shards: of none.
GPU_FN uint32_t place_of(const StepParams& params, uint32_t lane, uint32_t slot) {
  for (uint32_t place = 0; place < params.num_shards; ++place) {
    if (params.shards[place].lane == lane && params.shards[place].slot == slot &&
        params.messages[place].num_rows != 0)
      return place;
  }
  return params.num_shards;
}

// Whether the frame says what the request asked. Thread 0 calls it, with the private copy.
GPU_FN bool answers(const StepParams& params, uint32_t place, const unsigned char* header,
                    uint32_t num_bytes) {
  const StepShard& shard = params.shards[place];
  const StepMessage& message = params.messages[place];
  const wire::FrameKind kind = load_field<wire::FrameKind>(header, frame_offset::kKind);
  const bool is_error = kind == wire::FrameKind::kError;
  return load_field<uint32_t>(header, frame_offset::kMagic) == wire::kFrameMagic &&
         load_field<uint8_t>(header, frame_offset::kVersion) == wire::kFrameVersion &&
         (kind == wire::FrameKind::kReply || is_error) &&
         (is_error ||
          (load_field<Dtype>(header, frame_offset::kRequestDtype) == params.request_dtype &&
           load_field<Dtype>(header, frame_offset::kReplyDtype) == params.reply_dtype)) &&
         load_field<uint64_t>(header, frame_offset::kGeneration) ==
             params.lanes[shard.lane].generation &&
         load_field<uint64_t>(header, frame_offset::kCallId) ==
             params.state->first_call + params.call_index &&
         load_field<uint64_t>(header, frame_offset::kWeightsFingerprint) ==
             shard.weights_fingerprint &&
         load_field<uint32_t>(header, frame_offset::kLayer) == params.layer &&
         load_field<uint32_t>(header, frame_offset::kShard) == shard.shard &&
         load_field<uint32_t>(header, frame_offset::kNumRows) ==
             (is_error ? 0u : message.num_rows) &&
         load_field<uint32_t>(header, frame_offset::kNumPairs) ==
             (is_error ? 0u : message.num_pairs) &&
         load_field<uint32_t>(header, frame_offset::kPayloadBytes) ==
             num_bytes - wire::kFrameHeaderBytes &&
         load_field<uint16_t>(header, frame_offset::kSlice) == 0 &&
         load_field<uint16_t>(header, frame_offset::kAttempt) == 0 &&
         (is_error || num_bytes == message.reply_bytes);
}

// Whether the payload of the copy has the checksum that its header says, and the slot's header
// still says so and is of the same generation. Thread 0 calls it.
GPU_FN bool is_copy_whole(const unsigned char* copy, const unsigned char* slot, uint32_t sum) {
  const uint32_t said = load_field<uint32_t>(copy, frame_offset::kPayloadChecksum);
  return sum == said && load_field_again<uint32_t>(slot, frame_offset::kPayloadChecksum) == said &&
         load_field_again<uint64_t>(slot, frame_offset::kGeneration) ==
             load_field<uint64_t>(copy, frame_offset::kGeneration);
}

// Takes the message in the slot of the shard at `place`: 0, or how that failed. All threads of the
// block.
GPU_FN uint32_t take_reply(const StepParams& params, uint32_t place, uint32_t num_bytes,
                           StepScratch& scratch) {
  constexpr uint32_t kHeaderBytes = wire::kFrameHeaderBytes;
  const StepShard& shard = params.shards[place];
  const StepLane& lane = params.lanes[shard.lane];
  const unsigned char* slot = lane.replies + lane.reply_slots + shard.slot * lane.reply_stride;
  unsigned char* copy = params.incoming + place * params.incoming_stride;
  copy_units(copy, slot, num_bytes);
  sync_block();
  if (block_checksum(copy, wire::kCheckedHeaderBytes, scratch.sum) !=
      load_field<uint32_t>(copy, frame_offset::kHeaderChecksum))
    return reply_failure(StepDetail::kHeader);
  if (thread_index() == 0) scratch.answer.at(0) = answers(params, place, copy, num_bytes) ? 1u : 0u;
  sync_block();
  // Thread 0 writes the answer again only behind the barriers of block_checksum().
  const bool is_answer = scratch.answer.at(0) != 0;
  if (!is_answer) return reply_failure(StepDetail::kAnswer);
  const uint32_t sum = block_checksum(copy + kHeaderBytes, num_bytes - kHeaderBytes, scratch.sum);
  if (thread_index() == 0) scratch.answer.at(0) = is_copy_whole(copy, slot, sum) ? 1u : 0u;
  sync_block();
  // Thread 0 writes the answer again only behind the first barrier of the next reply.
  const bool is_whole = scratch.answer.at(0) != 0;
  if (!is_whole) return reply_failure(StepDetail::kChecksum);
  return load_field<wire::FrameKind>(copy, frame_offset::kKind) == wire::FrameKind::kError
             ? reply_failure(ErrorCode::kWorkerFailed)
             : 0u;
}

// Waits for the worker's next message and leaves in scratch.answer: 1 how that failed or 0, 2 the
// place of the shard concerned, 3 the message's bytes. `first` is the first shard that a reply is
// owed for, which stands for all where no message came. Thread 0 calls it.
GPU_FN void await_message(const StepParams& params, const StepLane& lane, uint32_t first,
                          StepScratch& scratch) {
  scratch.answer.at(1) = await_head(params, lane);
  scratch.answer.at(2) = first;
  scratch.answer.at(3) = 0;
  if (scratch.answer.at(1) != 0) return;
  const unsigned char* entry =
      lane.replies + transport::kEntriesOffset +
      (lane.tail / transport::kOneMessage & lane.entry_mask) * transport::kEntryBytes;
  const volatile uint32_t* length =
      reinterpret_cast<const volatile uint32_t*>(entry + transport::kEntryLengthOffset);
  const uint32_t place =
      place_of(params, block_x(),
               *reinterpret_cast<const volatile uint32_t*>(entry + transport::kEntrySlotOffset));
  const uint32_t num_bytes = length[1] != 0 ? 0u : length[0];  // no message has 2^32 bytes
  if (place == params.num_shards || num_bytes < wire::kFrameHeaderBytes ||
      num_bytes > params.incoming_stride)
    scratch.answer.at(1) = reply_failure(StepDetail::kIndex);
  if (place < params.num_shards) scratch.answer.at(2) = place;
  scratch.answer.at(3) = num_bytes;
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
    if (thread_index() == 0) await_message(params, lane, first, scratch);
    sync_block();
    const uint32_t refused = scratch.answer.at(1), place = scratch.answer.at(2),
                   num_bytes = scratch.answer.at(3);
    const uint32_t failure = refused != 0 ? refused : take_reply(params, place, num_bytes, scratch);
    if (failure != 0) {
      if (thread_index() == 0)
        fail_step(*params.state, static_cast<ErrorCode>(failure >> 8), place, params.call_index,
                  failure & 0xffu);
      return;  // the whole block
    }
    if (thread_index() == 0) lane.tail += transport::kOneMessage;
  }
}

}  // namespace dflash::device_exchange
