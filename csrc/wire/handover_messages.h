// The messages of a hand-over: how a supervisor gives a program without Python what it needs to
// call workers. Both ends use this codec; a golden file holds it to its bytes
// (tests/golden/handover).
//
// The supervisor sends the plan as one message for every worker, layer, shard and tensor, so that
// no model is too large for a frame. A data path is then made in three messages, at the start and
// whenever it is renewed: PathTerms, PathOffered, PathAnswered. The library makes the host's end
// with transport/kinds.h and the worker makes its own; the supervisor carries bytes and descriptors
// between them without looking. Numbers of types and fields are only ever added.
//
// A message is a msgpack map with integer keys, of which 0 is the message's type. It travels in a
// frame: u32 little-endian length, then so many bytes, at most kMaxControlFrameBytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/result.h"

namespace dflash::wire {

inline constexpr uint16_t kHandoverVersion = 2;
inline constexpr size_t kHandoverTokenBytes = 32;
// The most descriptors beside one message.
inline constexpr size_t kMaxHandoverDescriptors = 8;
inline constexpr size_t kControlLengthBytes = 4;
inline constexpr size_t kMaxControlFrameBytes = 64 * 1024;
inline constexpr size_t kMaxReasonBytes = 1024;
inline constexpr size_t kMaxHostBytes = 64;  // of a numeric address
inline constexpr size_t kMaxTensorNameBytes = 256;
inline constexpr size_t kMaxPathBytes = 4096;  // kMaxHandoverBytes of transport/kinds.h

struct OpenHandover {
  uint16_t version = kHandoverVersion;
  std::array<std::byte, kHandoverTokenBytes> token{};
  // layout_fingerprint() of the library, which was compiled at another time than the core.
  uint32_t layout = 0;
};
struct RefuseHandover {
  std::string text;
};
struct PlanHead {
  uint32_t num_workers = 0, num_layers = 0, num_shards = 0, num_tensors = 0;
  std::string architecture;  // llama.cpp's name of it
  std::string fingerprint;   // of the workers' checkpoint
  uint64_t spin_ns = 0, call_timeout_ns = 0, stall_timeout_ns = 0;
};
struct PlannedWorker {
  std::string name;
  uint32_t slice_tokens = 0, window = 0;
  bool is_measured = false;
  std::string request_dtype, reply_dtype;
};
struct PlannedLayer {
  uint32_t layer = 0;
  std::string name;
  uint32_t in_size = 0, intermediate_size = 0, out_size = 0;
  uint32_t num_experts = 0, top_k = 0, cost_class = 0;
  uint8_t activation = 0, gate = 0;  // numbers of Activation and GateKind
  double alpha = 0, up_offset = 0;
  double gate_max = 0, up_limit = 0;  // 0: no such limit
  bool has_gate_up_bias = false, has_down_bias = false;
};
struct PlannedShard {
  uint32_t layer = 0, shard = 0, worker = 0;
  uint64_t weights_fingerprint = 0;
  std::vector<uint64_t> expert_ranges;  // first and count of each range of expert ids, ascending
};
struct PlannedTensor {
  uint32_t layer = 0;
  std::string name;
  uint16_t ggml_type = 0;         // its number in GGUF
  std::vector<uint64_t> extents;  // the fastest one first, at most 4
  uint64_t num_bytes = 0;
  // Where it begins in its file: a stub's pages are aligned there (dflash_moe/model/stub.py).
  uint64_t file_offset = 0;
  // Of the content, by dflash_moe/model/tensor_sample.py. The supervisor of a stub has none.
  bool has_sample = false;
  uint32_t sample = 0;
};
struct PathTermsMessage {
  uint32_t worker = 0;
  uint64_t generation = 0;
  std::string transport;
  uint32_t num_slots = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;
  uint64_t socket_buffer_bytes = 0;
  uint32_t user_timeout_ms = 0;
  std::string local_host = {};  // as in transport::PathTerms
};
struct PathOffered {
  uint32_t worker = 0;
  uint64_t generation = 0;
  std::vector<std::byte> payload;
  uint16_t num_descriptors = 0;
};
struct PathAnswered {
  uint32_t worker = 0;
  uint64_t generation = 0;
  std::vector<std::byte> payload;
  uint16_t num_descriptors = 0;
  bool has_pulse = false;  // the first path of a session brings a pulse
};
struct HandoverReady {};
struct PathWorn {
  uint32_t worker = 0;
  std::string reason;
};
struct WorkerGone {
  uint32_t worker = 0;
  std::string reason;
};
struct TensorSeen {
  std::string name, reason;
};
struct Counted {
  uint64_t calls = 0, failed_calls = 0, messages = 0, rows = 0;
  uint64_t request_bytes = 0, reply_bytes = 0, floor_bytes = 0;
  // How long calls took together, and of that the time in which a worker computed.
  uint64_t call_ns = 0, compute_ns = 0;
  bool operator==(const Counted&) const = default;
};

// A message's type is its position here plus 1.
using HandoverMessage =
    std::variant<OpenHandover, RefuseHandover, PlanHead, PlannedWorker, PlannedLayer, PlannedShard,
                 PlannedTensor, PathTermsMessage, PathOffered, PathAnswered, HandoverReady,
                 PathWorn, WorkerGone, TensorSeen, Counted>;
// The name of a message, such as "PlanHead".
const char* handover_message_name(const HandoverMessage& message);

// Returns the msgpack form. Texts beyond their limit are cut at a character. Errors: kProtocol for
// any other field outside its limits.
Result<std::vector<std::byte>> encode_handover(const HandoverMessage& message);
// Any bytes give a message whose every field is within its limits, or kProtocol naming message and
// field.
Result<HandoverMessage> decode_handover(std::span<const std::byte> bytes);

}  // namespace dflash::wire
