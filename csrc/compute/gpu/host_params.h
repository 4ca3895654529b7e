// The parameters of the kernels that a host's device runs in a device step: packing requests,
// waiting for replies, combining. The bytes they write and read are those of docs/protocol.md,
// restated here because compute knows neither wire nor transport; tests compare them with the
// CPU's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kMostStepTokens = 64;  // of one call: a decode step's
inline constexpr uint32_t kMostStepTopK = 64;
inline constexpr uint32_t kMostStepCalls = 512;  // layers of one step
inline constexpr uint32_t kStepThreads = 256;
inline constexpr uint16_t kNoRow = 0xffff;

// Of a segment (csrc/transport/ring/layout.h).
inline constexpr uint32_t kRingHeadOffset = 128, kRingEntriesOffset = 384, kRingEntryBytes = 16;
// of the head word, whose low bit says that the writer closed
inline constexpr uint32_t kRingOneMessage = 2;
// Of a frame (csrc/wire/frame.h).
inline constexpr uint32_t kFrameBytes = 64, kTimingBytes = 64, kFrameMagicWord = 0x584d4644;
inline constexpr uint32_t kRequestKind = 1, kReplyKind = 2, kErrorKind = 3;
inline constexpr uint32_t kMostErrorBytes = 4 + 1024;  // of a worker's error, header aside

// One worker's data path as the device sees it, and how far it was used.
struct StepLane {
  unsigned char* requests;       // the host's segment
  const unsigned char* replies;  // the worker's
  uint64_t generation;
  uint64_t request_slots, request_stride;  // offset of slot 0, and from slot to slot
  uint64_t reply_slots, reply_stride;
  uint32_t entry_mask;
  uint32_t head, tail;  // what was published and taken, in units of the head words
  uint32_t reserved;
};

// One shard of a layer; ascending ids.
struct StepShard {
  uint64_t weights_fingerprint;
  uint32_t shard;
  uint32_t lane;  // its worker
  uint32_t slot;  // its place among the shards of this worker in this layer
  uint32_t reserved;
};

// What is under way for a shard in the call at hand. num_rows 0: nothing.
struct StepMessage {
  uint32_t num_rows, num_pairs;
  uint32_t request_bytes, reply_bytes;  // of the whole messages
};

// Why a step failed, in one word so that the first to fail decides: code, place and detail by
// fail_step.
struct StepState {
  uint64_t error;       // 0: none
  uint64_t first_call;  // id of the step's first call
  uint64_t started_ns;  // by the device's clock
  // of the whole step: behind the host's own deadline, for a host that cannot say
  uint64_t budget_ns;
};
// Values of ErrorCode (base/result.h), which kernels cannot include.
enum class StepCode : uint8_t {
  kInvalidArgument = 1,
  kProtocol = 3,
  kWorkerLost = 5,
  kTimeout = 6,
  kRange = 7,
  kWorkerFailed = 8,
  kClosed = 11,
};
enum class StepDetail : uint8_t {  // of a kProtocol error
  kIndex = 1,
  kHeader = 2,
  kAnswer = 3,
  kChecksum = 4,
};

// Shared by the three kernels of a call.
struct StepParams {
  StepState* state;
  StepLane* lanes;
  const StepShard* shards;  // [num_shards]
  const uint32_t* experts;  // [num_experts] shard's place << 16 | local id
  StepMessage* messages;    // [num_shards] of this call
  // [num_shards, kMostStepTokens] a token's row in the shard's message, or kNoRow
  uint16_t* row_places;
  unsigned char* outgoing;    // [num_shards, outgoing_stride] messages as they are packed
  unsigned char* incoming;    // [num_shards, incoming_stride] messages as they arrived
  const uint32_t* abort;      // the host's word: not 0, the step is given up
  const void* hidden_states;  // [num_tokens, in_size] in dtype, rows row_stride_bytes apart
  const void* topk_ids;       // [num_tokens, top_k]
  const void* topk_weights;   // [num_tokens, top_k] in weights_dtype
  void* output;               // [num_tokens, out_size] in dtype
  uint64_t row_stride_bytes;
  uint64_t outgoing_stride, incoming_stride;
  uint32_t num_tokens, top_k, num_experts, num_shards;
  uint32_t in_size, out_size;
  uint32_t layer, call_index;
  bool ids_are_64bit;
  Dtype dtype, weights_dtype, request_dtype, reply_dtype;
};
// The layouts of every compiler that sees this, as in kernel_params.h.
static_assert(sizeof(StepLane) == 72 && sizeof(StepShard) == 24 && sizeof(StepMessage) == 16 &&
              sizeof(StepState) == 32);
static_assert(sizeof(StepParams) == 168 && offsetof(StepParams, num_tokens) == 128 &&
              offsetof(StepParams, reply_dtype) == 164);

using PlainParams_pack_requests = StepParams;
using PlainParams_await_replies = StepParams;
using PlainParams_combine_replies = StepParams;

}  // namespace dflash::compute::gpu
