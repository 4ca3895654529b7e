// One table of fields per message, which both directions walk: the key, the name for errors, the
// member, and its limit.
// SPDX-License-Identifier: Apache-2.0
#include "wire/handover_messages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "wire/msgpack.h"

namespace dflash::wire {
namespace {

constexpr uint64_t kU16 = 0xffff, kU32 = 0xffff'ffff, kU64 = ~uint64_t{0};
constexpr double kMaxReal = 1e9;
constexpr size_t kMaxPayloadOctets = 4096;  // kMaxHandoverBytes of transport/kinds.h
constexpr size_t kMaxRangeNumbers = 4096;

constexpr const char* kNames[] = {
    "OpenHandover", "RefuseHandover", "PlanHead",   "PlannedWorker", "PlannedLayer",
    "PlannedShard", "PlannedTensor",  "PathTerms",  "PathOffered",   "PathAnswered",
    "Ready",        "PathWorn",       "WorkerGone", "TensorSeen",    "Counted"};
static_assert(std::size(kNames) == std::variant_size_v<HandoverMessage>);

// A message to read into, or one to write.
template <class M, class T>
concept Is = std::is_same_v<std::remove_const_t<M>, T>;

// -- the fields of every message --

void walk(auto& w, Is<OpenHandover> auto& m) {
  w.uint(1, "version", m.version, kU16);
  w.fixed(2, "token", m.token);
  w.uint(3, "layout", m.layout, kU32);
}
void walk(auto& w, Is<RefuseHandover> auto& m) { w.text(1, "text", m.text, kMaxReasonBytes); }
void walk(auto& w, Is<PlanHead> auto& m) {
  w.uint(1, "num_workers", m.num_workers, 1024);
  w.uint(2, "num_layers", m.num_layers, 4096);
  w.uint(3, "num_shards", m.num_shards, 1 << 20);
  w.uint(4, "num_tensors", m.num_tensors, 1 << 16);
  w.text(5, "architecture", m.architecture, 64);
  w.text(6, "fingerprint", m.fingerprint, 128);
  w.uint(7, "spin_ns", m.spin_ns, kU64);
  w.uint(8, "call_timeout_ns", m.call_timeout_ns, kU64);
  w.uint(9, "stall_timeout_ns", m.stall_timeout_ns, kU64);
}
void walk(auto& w, Is<PlannedWorker> auto& m) {
  w.text(1, "name", m.name, 128);
  w.uint(2, "slice_tokens", m.slice_tokens, kU32);
  w.uint(3, "window", m.window, kU32);
  w.flag(4, "is_measured", m.is_measured);
  w.text(5, "request_dtype", m.request_dtype, 8);
  w.text(6, "reply_dtype", m.reply_dtype, 8);
}
void walk(auto& w, Is<PlannedLayer> auto& m) {
  w.uint(1, "layer", m.layer, kU32);
  w.text(2, "name", m.name, kMaxTensorNameBytes);
  w.uint(3, "in_size", m.in_size, kU32);
  w.uint(4, "intermediate_size", m.intermediate_size, kU32);
  w.uint(5, "out_size", m.out_size, kU32);
  w.uint(6, "num_experts", m.num_experts, kU32);
  w.uint(7, "top_k", m.top_k, kU32);
  w.uint(8, "cost_class", m.cost_class, kU32);
  w.uint(9, "activation", m.activation, 255);
  w.uint(10, "gate", m.gate, 255);
  w.real(11, "alpha", m.alpha, -kMaxReal);
  w.real(12, "up_offset", m.up_offset, -kMaxReal);
  w.real(13, "gate_max", m.gate_max, 0);
  w.real(14, "up_limit", m.up_limit, 0);
  w.flag(15, "has_gate_up_bias", m.has_gate_up_bias);
  w.flag(16, "has_down_bias", m.has_down_bias);
}
void walk(auto& w, Is<PlannedShard> auto& m) {
  w.uint(1, "layer", m.layer, kU32);
  w.uint(2, "shard", m.shard, kU32);
  w.uint(3, "worker", m.worker, kU32);
  w.uint(4, "weights_fingerprint", m.weights_fingerprint, kU64);
  w.list(5, "expert_ranges", m.expert_ranges, kMaxRangeNumbers, kU32);
}
void walk(auto& w, Is<PlannedTensor> auto& m) {
  w.uint(1, "layer", m.layer, kU32);
  w.text(2, "name", m.name, kMaxTensorNameBytes);
  w.uint(3, "ggml_type", m.ggml_type, kU16);
  w.list(4, "extents", m.extents, 4, kU64);
  w.uint(5, "num_bytes", m.num_bytes, kU64);
  w.uint(6, "file_offset", m.file_offset, kU64);
  w.flag(7, "has_sample", m.has_sample);
  w.uint(8, "sample", m.sample, kU32);
}
void walk(auto& w, Is<PathTermsMessage> auto& m) {
  w.uint(1, "worker", m.worker, kU32);
  w.uint(2, "generation", m.generation, kU64);
  w.text(3, "transport", m.transport, 32);
  w.uint(4, "num_slots", m.num_slots, kU32);
  w.uint(5, "request_bytes", m.request_bytes, kU64);
  w.uint(6, "reply_bytes", m.reply_bytes, kU64);
  w.uint(7, "socket_buffer_bytes", m.socket_buffer_bytes, kU64);
  w.uint(8, "user_timeout_ms", m.user_timeout_ms, kU32);
}
void walk(auto& w, Is<PathOffered> auto& m) {
  w.uint(1, "worker", m.worker, kU32);
  w.uint(2, "generation", m.generation, kU64);
  w.octets(3, "payload", m.payload, kMaxPayloadOctets);
  w.uint(4, "num_descriptors", m.num_descriptors, kU16);
}
void walk(auto& w, Is<PathAnswered> auto& m) {
  w.uint(1, "worker", m.worker, kU32);
  w.uint(2, "generation", m.generation, kU64);
  w.octets(3, "payload", m.payload, kMaxPayloadOctets);
  w.uint(4, "num_descriptors", m.num_descriptors, kU16);
  w.flag(5, "has_pulse", m.has_pulse);
}
void walk(auto&, Is<HandoverReady> auto&) {}
template <class M>
  requires Is<M, PathWorn> || Is<M, WorkerGone>
void walk(auto& w, M& m) {
  w.uint(1, "worker", m.worker, kU32);
  w.text(2, "reason", m.reason, kMaxReasonBytes);
}
void walk(auto& w, Is<TensorSeen> auto& m) {
  w.text(1, "name", m.name, kMaxTensorNameBytes);
  w.text(2, "reason", m.reason, kMaxReasonBytes);
}
void walk(auto& w, Is<Counted> auto& m) {
  w.uint(1, "calls", m.calls, kU64);
  w.uint(2, "failed_calls", m.failed_calls, kU64);
  w.uint(3, "messages", m.messages, kU64);
  w.uint(4, "rows", m.rows, kU64);
  w.uint(5, "request_bytes", m.request_bytes, kU64);
  w.uint(6, "reply_bytes", m.reply_bytes, kU64);
  w.uint(7, "floor_bytes", m.floor_bytes, kU64);
  w.uint(8, "call_ns", m.call_ns, kU64);
  w.uint(9, "compute_ns", m.compute_ns, kU64);
}

// -- the directions --

// Keeps the first error that a walk meets.
class Walk {
 public:
  explicit Walk(const char* message) : message_(message) {}
  Status outcome() && {
    if (error_.empty()) return ok();
    return Error{ErrorCode::kProtocol, std::move(error_)};
  }
  bool has_failed() const { return !error_.empty(); }

 protected:
  void refuse(const char* field, const std::string& what) {
    if (error_.empty())
      error_ = std::string("message ") + message_ + ": field " + field + ": " + what;
  }
  std::string error_;
  const char* message_;
};

class CountFields {
 public:
  uint32_t num_fields = 0;
  template <class... Any>
  void uint(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void flag(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void real(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void text(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void fixed(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void octets(Any&&...) {
    ++num_fields;
  }
  template <class... Any>
  void list(Any&&...) {
    ++num_fields;
  }
};

// Returns the longest beginning of `text` within `max_bytes` that ends at a character.
std::string_view fitted(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  size_t end = max_bytes;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;
  return text.substr(0, end);
}

class Encoder : public Walk {
 public:
  using Walk::Walk;
  MsgpackWriter writer;

  template <class T>
  void uint(uint64_t key, const char* field, const T& value, uint64_t maximum) {
    if (value > maximum)
      refuse(field, "is " + std::to_string(value) + "; allowed are 0.." + std::to_string(maximum));
    writer.uint(key);
    writer.uint(value);
  }
  void flag(uint64_t key, const char*, bool value) {
    writer.uint(key);
    writer.boolean(value);
  }
  void real(uint64_t key, const char* field, double value, double minimum) {
    if (!(value >= minimum && value <= kMaxReal)) refuse(field, "is out of range");
    writer.uint(key);
    writer.real(value);
  }
  void text(uint64_t key, const char* field, const std::string& value, size_t max_bytes) {
    const std::string_view cut = fitted(value, max_bytes);
    if (!is_plain_utf8(cut)) refuse(field, "is not UTF-8, or has a zero byte");
    writer.uint(key);
    writer.text(cut);
  }
  template <size_t N>
  void fixed(uint64_t key, const char*, const std::array<std::byte, N>& value) {
    writer.uint(key);
    writer.binary(value);
  }
  void octets(uint64_t key, const char* field, const std::vector<std::byte>& value,
              size_t max_bytes) {
    if (value.size() > max_bytes) refuse(field, "has " + std::to_string(value.size()) + " bytes");
    writer.uint(key);
    writer.binary(value);
  }
  void list(uint64_t key, const char* field, const std::vector<uint64_t>& value, size_t max_items,
            uint64_t maximum) {
    if (value.size() > max_items) refuse(field, "has " + std::to_string(value.size()) + " items");
    writer.uint(key);
    writer.array(static_cast<uint32_t>(value.size()));
    for (const uint64_t item : value) {
      if (item > maximum) refuse(field, "has the item " + std::to_string(item));
      writer.uint(item);
    }
  }
};

// Reads fields out of the map and takes them away, so that what is left is unknown.
class Decoder : public Walk {
 public:
  Decoder(const char* message, MsgpackMap& map) : Walk(message), map_(map) {}

  template <class T>
  void uint(uint64_t key, const char* field, T& value, uint64_t maximum) {
    const auto found = take(key, field);
    if (!found) return;
    const uint64_t* number = std::get_if<uint64_t>(&*found);
    if (number == nullptr || *number > maximum)
      return refuse(field, "allowed is an integer 0.." + std::to_string(maximum));
    value = static_cast<T>(*number);
  }
  void flag(uint64_t key, const char* field, bool& value) {
    const auto found = take(key, field);
    if (!found) return;
    const bool* is_set = std::get_if<bool>(&*found);
    if (is_set == nullptr) return refuse(field, "allowed is true or false");
    value = *is_set;
  }
  void real(uint64_t key, const char* field, double& value, double minimum) {
    const auto found = take(key, field);
    if (!found) return;
    double number = std::numeric_limits<double>::quiet_NaN();
    if (const double* real = std::get_if<double>(&*found)) number = *real;
    if (const uint64_t* whole = std::get_if<uint64_t>(&*found))
      number = static_cast<double>(*whole);
    if (const int64_t* whole = std::get_if<int64_t>(&*found)) number = static_cast<double>(*whole);
    if (!(number >= minimum && number <= kMaxReal))  // false for NaN
      return refuse(field, "allowed is a number " + std::to_string(minimum) + ".." +
                               std::to_string(kMaxReal));
    value = number;
  }
  void text(uint64_t key, const char* field, std::string& value, size_t max_bytes) {
    const auto found = take(key, field);
    if (!found) return;
    const std::string_view* view = std::get_if<std::string_view>(&*found);
    if (view == nullptr || view->size() > max_bytes)
      return refuse(field, "allowed is text of at most " + std::to_string(max_bytes) + " bytes");
    value.assign(*view);
  }
  template <size_t N>
  void fixed(uint64_t key, const char* field, std::array<std::byte, N>& value) {
    const auto found = take(key, field);
    if (!found) return;
    const MsgpackBytes* view = std::get_if<MsgpackBytes>(&*found);
    if (view == nullptr || view->size() != N)
      return refuse(field, "allowed is a binary of exactly " + std::to_string(N) + " bytes");
    std::copy(view->begin(), view->end(), value.begin());
  }
  void octets(uint64_t key, const char* field, std::vector<std::byte>& value, size_t max_bytes) {
    const auto found = take(key, field);
    if (!found) return;
    const MsgpackBytes* view = std::get_if<MsgpackBytes>(&*found);
    if (view == nullptr || view->size() > max_bytes)
      return refuse(field,
                    "allowed is a binary of at most " + std::to_string(max_bytes) + " bytes");
    value.assign(view->begin(), view->end());
  }
  void list(uint64_t key, const char* field, std::vector<uint64_t>& value, size_t max_items,
            uint64_t maximum) {
    const auto found = map_.find(key);
    if (found == map_.end()) return refuse(field, "is missing");
    const auto* items = std::get_if<std::vector<MsgpackScalar>>(&found->second);
    if (items == nullptr || items->size() > max_items)
      return refuse(field, "allowed is a list of at most " + std::to_string(max_items) + " items");
    for (const MsgpackScalar& item : *items) {
      const uint64_t* number = std::get_if<uint64_t>(&item);
      if (number == nullptr || *number > maximum)
        return refuse(field, "allowed are integers 0.." + std::to_string(maximum));
      value.push_back(*number);
    }
    map_.erase(found);
  }

 private:
  std::optional<MsgpackScalar> take(uint64_t key, const char* field) {
    const auto found = map_.find(key);
    if (found == map_.end()) {
      refuse(field, "is missing");
      return std::nullopt;
    }
    const MsgpackScalar* scalar = std::get_if<MsgpackScalar>(&found->second);
    if (scalar == nullptr) {
      refuse(field, "found a list");
      return std::nullopt;
    }
    const MsgpackScalar taken = *scalar;
    map_.erase(found);
    return taken;
  }

  MsgpackMap& map_;
};

// Returns the alternative with this index, default-made.
template <size_t... I>
HandoverMessage made(size_t index, std::index_sequence<I...>) {
  HandoverMessage message;
  static_cast<void>(((index == I ? (message.emplace<I>(), true) : false) || ...));
  return message;
}

}  // namespace

const char* handover_message_name(const HandoverMessage& message) {
  return kNames[message.index()];
}

Result<std::vector<std::byte>> encode_handover(const HandoverMessage& message) {
  Encoder encoder(handover_message_name(message));
  std::visit(
      [&](const auto& one) {
        CountFields count;
        walk(count, one);
        encoder.writer.map(count.num_fields + 1);
        encoder.writer.uint(0);
        encoder.writer.uint(message.index() + 1);
        walk(encoder, one);
      },
      message);
  std::vector<std::byte> bytes = std::move(encoder.writer).take();
  DFLASH_TRY(std::move(encoder).outcome());
  if (bytes.size() > kMaxControlFrameBytes)
    return Error{ErrorCode::kProtocol, std::string("message ") + handover_message_name(message) +
                                           " exceeds the frame limit"};
  return bytes;
}

Result<HandoverMessage> decode_handover(std::span<const std::byte> bytes) {
  if (bytes.size() > kMaxControlFrameBytes)
    return Error{ErrorCode::kProtocol, "frame: " + std::to_string(bytes.size()) +
                                           " bytes exceed the limit of " +
                                           std::to_string(kMaxControlFrameBytes)};
  auto read = read_msgpack_map(bytes);
  if (!read.ok()) return std::move(read).error();
  MsgpackMap& map = read.value();
  constexpr size_t kNumTypes = std::variant_size_v<HandoverMessage>;
  uint64_t type = 0;
  if (const auto found = map.find(0); found != map.end()) {
    if (const auto* scalar = std::get_if<MsgpackScalar>(&found->second)) {
      if (const uint64_t* number = std::get_if<uint64_t>(scalar)) type = *number;
    }
    map.erase(found);
  }
  if (type < 1 || type > kNumTypes)
    return Error{ErrorCode::kProtocol,
                 "message type: allowed are 1.." + std::to_string(kNumTypes) + " under key 0"};
  HandoverMessage message =
      made(static_cast<size_t>(type - 1), std::make_index_sequence<kNumTypes>());
  const char* const name = handover_message_name(message);
  Decoder decoder(name, map);
  std::visit([&](auto& one) { walk(decoder, one); }, message);
  DFLASH_TRY(std::move(decoder).outcome());
  if (!map.empty())
    return Error{ErrorCode::kProtocol, std::string("message ") + name + ": unknown field " +
                                           std::to_string(map.begin()->first)};
  return message;
}

}  // namespace dflash::wire
