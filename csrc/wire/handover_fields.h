// The table of a hand-over's messages: name, meaning, and of every field the key, the name and its
// limits. Codec, bindings and documents walk it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <string>
#include <tuple>
#include <type_traits>

#include "wire/handover_messages.h"

namespace dflash::wire {

inline constexpr double kMaxHandoverReal = 1e9;

// What `limit` says depends on the member: the maximum of an integer, the most bytes of a text and
// of octets, and the most items of a list, each of which is `item_limit` at most. A real is
// kMaxHandoverReal at most.
template <class Message, class Member>
struct HandoverField {
  using Of = Message;
  uint64_t key;
  const char* name;
  Member Message::* member;
  uint64_t limit;
  uint64_t item_limit;
  double minimum;
};

template <class Message, class Member>
constexpr auto field(uint64_t key, const char* name, Member Message::* member, uint64_t limit = 0,
                     uint64_t item_limit = 0) {
  if constexpr (std::is_integral_v<Member> && !std::is_same_v<Member, bool>)
    if (limit == 0) limit = std::numeric_limits<Member>::max();
  return HandoverField<Message, Member>{key, name, member, limit, item_limit, 0};
}
template <class Message>
constexpr auto real(uint64_t key, const char* name, double Message::* member, double minimum) {
  return HandoverField<Message, double>{key, name, member, 0, 0, minimum};
}

template <class Message>
struct HandoverTable;

template <>
struct HandoverTable<OpenHandover> {
  static constexpr const char* kName = "OpenHandover";
  static constexpr const char* kMeaning =
      "Library to supervisor, first: proves with the inherited token that it was meant.";
  static constexpr auto kFields = std::tuple(field(1, "version", &OpenHandover::version),
                                             field(2, "token", &OpenHandover::token),
                                             field(3, "layout", &OpenHandover::layout));
};
template <>
struct HandoverTable<RefuseHandover> {
  static constexpr const char* kName = "RefuseHandover";
  static constexpr const char* kMeaning =
      "Supervisor to library: why nothing is handed over. The supervisor closes afterwards.";
  static constexpr auto kFields =
      std::tuple(field(1, "text", &RefuseHandover::text, kMaxReasonBytes));
};
template <>
struct HandoverTable<PlanHead> {
  static constexpr const char* kName = "PlanHead";
  static constexpr const char* kMeaning =
      "Supervisor to library: what concerns all calls, and how many messages of each kind follow.";
  static constexpr auto kFields = std::tuple(
      field(1, "num_workers", &PlanHead::num_workers, 1024),
      field(2, "num_layers", &PlanHead::num_layers, 4096),
      field(3, "num_shards", &PlanHead::num_shards, 1 << 20),
      field(4, "num_tensors", &PlanHead::num_tensors, 1 << 16),
      field(5, "architecture", &PlanHead::architecture, 64),
      field(6, "fingerprint", &PlanHead::fingerprint, 128), field(7, "spin_ns", &PlanHead::spin_ns),
      field(8, "call_timeout_ns", &PlanHead::call_timeout_ns),
      field(9, "stall_timeout_ns", &PlanHead::stall_timeout_ns));
};
template <>
struct HandoverTable<PlannedWorker> {
  static constexpr const char* kName = "PlannedWorker";
  static constexpr const char* kMeaning =
      "Supervisor to library: a worker, numbered in the order of these messages.";
  static constexpr auto kFields =
      std::tuple(field(1, "name", &PlannedWorker::name, 128),
                 field(2, "slice_tokens", &PlannedWorker::slice_tokens),
                 field(3, "window", &PlannedWorker::window),
                 field(4, "is_measured", &PlannedWorker::is_measured),
                 field(5, "request_dtype", &PlannedWorker::request_dtype, 8),
                 field(6, "reply_dtype", &PlannedWorker::reply_dtype, 8));
};
template <>
struct HandoverTable<PlannedLayer> {
  static constexpr const char* kName = "PlannedLayer";
  static constexpr const char* kMeaning =
      "Supervisor to library: a layer and its experts' formula (csrc/compute/experts/ffn_spec.h).";
  static constexpr auto kFields = std::tuple(
      field(1, "layer", &PlannedLayer::layer),
      field(2, "name", &PlannedLayer::name, kMaxTensorNameBytes),
      field(3, "in_size", &PlannedLayer::in_size),
      field(4, "intermediate_size", &PlannedLayer::intermediate_size),
      field(5, "out_size", &PlannedLayer::out_size),
      field(6, "num_experts", &PlannedLayer::num_experts), field(7, "top_k", &PlannedLayer::top_k),
      field(8, "cost_class", &PlannedLayer::cost_class),
      field(9, "activation", &PlannedLayer::activation), field(10, "gate", &PlannedLayer::gate),
      real(11, "alpha", &PlannedLayer::alpha, -kMaxHandoverReal),
      real(12, "up_offset", &PlannedLayer::up_offset, -kMaxHandoverReal),
      real(13, "gate_max", &PlannedLayer::gate_max, 0),
      real(14, "up_limit", &PlannedLayer::up_limit, 0),
      field(15, "has_gate_up_bias", &PlannedLayer::has_gate_up_bias),
      field(16, "has_down_bias", &PlannedLayer::has_down_bias));
};
template <>
struct HandoverTable<PlannedShard> {
  static constexpr const char* kName = "PlannedShard";
  static constexpr const char* kMeaning =
      "Supervisor to library: the experts of a layer that one worker holds.";
  static constexpr auto kFields =
      std::tuple(field(1, "layer", &PlannedShard::layer), field(2, "shard", &PlannedShard::shard),
                 field(3, "worker", &PlannedShard::worker),
                 field(4, "weights_fingerprint", &PlannedShard::weights_fingerprint),
                 field(5, "expert_ranges", &PlannedShard::expert_ranges, 4096, 0xffff'ffff));
};
template <>
struct HandoverTable<PlannedTensor> {
  static constexpr const char* kName = "PlannedTensor";
  static constexpr const char* kMeaning =
      "Supervisor to library: a tensor of the checkpoint that the workers stand in for.";
  static constexpr auto kFields =
      std::tuple(field(1, "layer", &PlannedTensor::layer),
                 field(2, "name", &PlannedTensor::name, kMaxTensorNameBytes),
                 field(3, "ggml_type", &PlannedTensor::ggml_type),
                 field(4, "extents", &PlannedTensor::extents, 4, ~uint64_t{0}),
                 field(5, "num_bytes", &PlannedTensor::num_bytes),
                 field(6, "file_offset", &PlannedTensor::file_offset),
                 field(7, "has_sample", &PlannedTensor::has_sample),
                 field(8, "sample", &PlannedTensor::sample));
};
template <>
struct HandoverTable<PathTermsMessage> {
  static constexpr const char* kName = "PathTerms";
  static constexpr const char* kMeaning =
      "Supervisor to library: make the host's end of a data path. The supervisor sends it for "
      "every worker at the start, in answer to PathWorn, and when a lost worker has come back.";
  static constexpr auto kFields =
      std::tuple(field(1, "worker", &PathTermsMessage::worker),
                 field(2, "generation", &PathTermsMessage::generation),
                 field(3, "transport", &PathTermsMessage::transport, 32),
                 field(4, "num_slots", &PathTermsMessage::num_slots),
                 field(5, "request_bytes", &PathTermsMessage::request_bytes),
                 field(6, "reply_bytes", &PathTermsMessage::reply_bytes),
                 field(7, "socket_buffer_bytes", &PathTermsMessage::socket_buffer_bytes),
                 field(8, "user_timeout_ms", &PathTermsMessage::user_timeout_ms),
                 field(9, "local_host", &PathTermsMessage::local_host, kMaxHostBytes));
};
template <>
struct HandoverTable<PathOffered> {
  static constexpr const char* kName = "PathOffered";
  static constexpr const char* kMeaning =
      "Library to supervisor: what the worker needs to make its end, with descriptors.";
  static constexpr auto kFields = std::tuple(
      field(1, "worker", &PathOffered::worker), field(2, "generation", &PathOffered::generation),
      field(3, "payload", &PathOffered::payload, kMaxPathBytes),
      field(4, "num_descriptors", &PathOffered::num_descriptors));
};
template <>
struct HandoverTable<PathAnswered> {
  static constexpr const char* kName = "PathAnswered";
  static constexpr const char* kMeaning =
      "Supervisor to library: what completes the host's end. The worker's descriptors come first, "
      "then a dialled connection of the path where the transport has one, then the pulse.";
  static constexpr auto kFields = std::tuple(
      field(1, "worker", &PathAnswered::worker), field(2, "generation", &PathAnswered::generation),
      field(3, "payload", &PathAnswered::payload, kMaxPathBytes),
      field(4, "num_descriptors", &PathAnswered::num_descriptors),
      field(5, "has_pulse", &PathAnswered::has_pulse));
};
template <>
struct HandoverTable<HandoverReady> {
  static constexpr const char* kName = "Ready";
  static constexpr const char* kMeaning =
      "Supervisor to library: the plan is complete and every worker has its path.";
  static constexpr auto kFields = std::tuple();
};
template <>
struct HandoverTable<PathWorn> {
  static constexpr const char* kName = "PathWorn";
  static constexpr const char* kMeaning =
      "Library to supervisor: a path must be renewed; nothing is under way on it.";
  static constexpr auto kFields =
      std::tuple(field(1, "worker", &PathWorn::worker),
                 field(2, "reason", &PathWorn::reason, kMaxReasonBytes));
};
template <>
struct HandoverTable<WorkerGone> {
  static constexpr const char* kName = "WorkerGone";
  static constexpr const char* kMeaning =
      "Either direction: a worker is lost. The supervisor has seen its process or connection end; "
      "the library has judged it by its pulse or by a call's deadline.";
  static constexpr auto kFields =
      std::tuple(field(1, "worker", &WorkerGone::worker),
                 field(2, "reason", &WorkerGone::reason, kMaxReasonBytes));
};
template <>
struct HandoverTable<TensorSeen> {
  static constexpr const char* kName = "TensorSeen";
  static constexpr const char* kMeaning =
      "Library to supervisor: the program loads a tensor. Without a reason the workers stand in "
      "for it; with one the program keeps it.";
  static constexpr auto kFields =
      std::tuple(field(1, "name", &TensorSeen::name, kMaxTensorNameBytes),
                 field(2, "reason", &TensorSeen::reason, kMaxReasonBytes));
};
template <>
struct HandoverTable<Counted> {
  static constexpr const char* kName = "Counted";
  static constexpr const char* kMeaning =
      "Library to supervisor: counters since the start, sent at most twice a second while they "
      "change, and at the end.";
  static constexpr auto kFields = std::tuple(
      field(1, "calls", &Counted::calls), field(2, "failed_calls", &Counted::failed_calls),
      field(3, "messages", &Counted::messages), field(4, "rows", &Counted::rows),
      field(5, "request_bytes", &Counted::request_bytes),
      field(6, "reply_bytes", &Counted::reply_bytes),
      field(7, "floor_bytes", &Counted::floor_bytes), field(8, "call_ns", &Counted::call_ns),
      field(9, "compute_ns", &Counted::compute_ns));
};

// Calls `visit` with each field of a message's table.
template <class Message, class Visit>
constexpr void each_field(const Visit& visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, HandoverTable<Message>::kFields);
}

}  // namespace dflash::wire
