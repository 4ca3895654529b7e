// What the host and the kernels of a device step share: the parameters of the three kernels (pack
// requests, await replies, combine them), the tables in device memory that these point to, and the
// word that says how a step failed. Plain structs, the same for nvcc, hipcc and the simulator;
// pointers are device addresses. The bytes that travel are described in wire/frame_layout.h,
// wire/payload_layout.h and transport/ring/ring_words.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/error_code.h"

namespace dflash::device_exchange {

// A device step is for decoding, so its calls are small: larger ones go through experts().
inline constexpr uint32_t kMostStepTokens = 64;      // of one call
inline constexpr uint32_t kMostStepTopK = 64;        // experts of one token
inline constexpr uint32_t kMostStepCalls = 512;      // of one step: its layers
inline constexpr uint32_t kStepThreads = 256;        // per block of each of the three kernels
inline constexpr uint16_t kNoRow = 0xffff;           // the token has no row in the shard's message
inline constexpr uint32_t kNoExpert = ~uint32_t{0};  // the expert id is a sentinel

// One worker's data path as the device sees it, and how far it was used.
struct StepLane {
  unsigned char* requests;       // the segment that the host writes
  const unsigned char* replies;  // the segment that the worker writes
  uint64_t generation;
  uint64_t request_slots, request_stride;  // offset of slot 0, and from slot to slot
  uint64_t reply_slots, reply_stride;
  uint32_t entry_mask;
  uint32_t head, tail;  // what was published and what was taken, in units of the head words
  uint32_t reserved;
};

// One shard of a layer. A layer's shards are a table in ascending id; a shard's index in it is its
// place.
struct StepShard {
  uint64_t weights_fingerprint;
  uint32_t shard;
  uint32_t lane;  // the worker that holds it
  uint32_t slot;  // which of that worker's shards of this layer it is
  uint32_t reserved;
};

// What is under way for one shard in the call at hand. num_rows 0: nothing.
struct StepMessage {
  uint32_t num_rows, num_pairs;
  uint32_t request_bytes, reply_bytes;  // of the whole messages, frame header included
};

// The step's state in device memory.
struct StepState {
  uint64_t error;       // 0: none; else the first failure's word, see below
  uint64_t first_call;  // id of the step's first call; the others count on from it
  uint64_t started_ns;  // by the device's clock
  // The device gives up by itself this long after started_ns. It lies behind the host's own
  // deadline, and is for a host that cannot say any more.
  uint64_t budget_ns;
};

// What about a peer's bytes was wrong: the detail of a failure with ErrorCode::kProtocol. In other
// failures the detail is the token, or 0.
enum class StepDetail : uint8_t {
  kIndex = 1,     // the ring's entry names no slot or length that was asked for
  kHeader = 2,    // the header's own checksum
  kAnswer = 3,    // a sound header that answers something else
  kChecksum = 4,  // the payload's checksum, or a header that changed while it was read
};

// A failure is one word, so that an atomic operation decides which was first: the code in bits
// 56..63, the shard's place in 40..55 (kNoPlace: at no shard), the index of the call in its step in
// 24..39, the detail in 0..23.
inline constexpr uint32_t kNoPlace = 0xffff;
constexpr uint64_t step_error(ErrorCode code, uint32_t place, uint32_t call_index,
                              uint32_t detail) {
  return static_cast<uint64_t>(code) << 56 | uint64_t{place & 0xffffu} << 40 |
         uint64_t{call_index & 0xffffu} << 24 | (detail & 0xffffffu);
}
constexpr ErrorCode step_error_code(uint64_t error) { return static_cast<ErrorCode>(error >> 56); }
constexpr uint32_t step_error_place(uint64_t error) {
  return static_cast<uint32_t>(error >> 40 & 0xffffu);
}
constexpr uint32_t step_error_call(uint64_t error) {
  return static_cast<uint32_t>(error >> 24 & 0xffffu);
}
constexpr uint32_t step_error_detail(uint64_t error) {
  return static_cast<uint32_t>(error & 0xffffffu);
}

// The parameter of all three kernels of a call.
struct StepParams {
  StepState* state;
  StepLane* lanes;
  const StepShard* shards;  // [num_shards]
  const uint32_t* experts;  // [num_experts] the place of the expert's shard << 16 | its local id
  StepMessage* messages;    // [num_shards] of this call
  // [num_shards, kMostStepTokens] a token's row in the shard's message, or kNoRow
  uint16_t* row_places;
  unsigned char* outgoing;    // [num_shards, outgoing_stride] messages as they are packed
  unsigned char* incoming;    // [num_shards, incoming_stride] messages as they arrived
  const uint32_t* abort;      // the host's word: once it is not 0, the step is given up
  const void* hidden_states;  // [num_tokens, in_size] in dtype, rows row_stride_bytes apart
  const void* topk_ids;       // [num_tokens, top_k] i64 where ids_are_64bit, else i32
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

// The vendor's compiler must lay these out as the host's does, which writes them.
static_assert(sizeof(StepLane) == 72 && sizeof(StepShard) == 24 && sizeof(StepMessage) == 16 &&
              sizeof(StepState) == 32);
static_assert(sizeof(StepParams) == 168 && offsetof(StepParams, num_tokens) == 128 &&
              offsetof(StepParams, reply_dtype) == 164);

}  // namespace dflash::device_exchange
