// Both directions walk the table of handover_fields.h.
// SPDX-License-Identifier: Apache-2.0
#include "wire/handover_messages.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "wire/handover_fields.h"
#include "wire/msgpack.h"

namespace dflash::wire {
namespace {

// Calls `walk` with each field of a message by what its member is.
template <class Walk, class Message>
void walk_fields(Walk& walk, Message& message) {
  each_field<std::remove_const_t<Message>>([&](const auto& field) {
    auto& value = message.*field.member;
    using Value = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, bool>)
      walk.flag(field.key, field.name, value);
    else if constexpr (std::is_same_v<Value, double>)
      walk.real(field.key, field.name, value, field.minimum);
    else if constexpr (std::is_same_v<Value, std::string>)
      walk.text(field.key, field.name, value, field.limit);
    else if constexpr (std::is_same_v<Value, std::vector<std::byte>>)
      walk.octets(field.key, field.name, value, field.limit);
    else if constexpr (std::is_same_v<Value, std::vector<uint64_t>>)
      walk.list(field.key, field.name, value, field.limit, field.item_limit);
    else if constexpr (std::is_integral_v<Value>)
      walk.uint(field.key, field.name, value, field.limit);
    else
      walk.fixed(field.key, field.name, value);
  });
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
    if (!(value >= minimum && value <= kMaxHandoverReal)) refuse(field, "is out of range");
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
    if (!(number >= minimum && number <= kMaxHandoverReal))  // false for NaN
      return refuse(field, "allowed is a number " + std::to_string(minimum) + ".." +
                               std::to_string(kMaxHandoverReal));
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
  return std::visit([]<class Message>(const Message&) { return HandoverTable<Message>::kName; },
                    message);
}

Result<std::vector<std::byte>> encode_handover(const HandoverMessage& message) {
  Encoder encoder(handover_message_name(message));
  std::visit(
      [&]<class Message>(const Message& one) {
        encoder.writer.map(uint32_t{std::tuple_size_v<decltype(HandoverTable<Message>::kFields)>} +
                           1);
        encoder.writer.uint(0);
        encoder.writer.uint(message.index() + 1);
        walk_fields(encoder, one);
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
  std::visit([&](auto& one) { walk_fields(decoder, one); }, message);
  DFLASH_TRY(std::move(decoder).outcome());
  if (!map.empty())
    return Error{ErrorCode::kProtocol, std::string("message ") + name + ": unknown field " +
                                           std::to_string(map.begin()->first)};
  return message;
}

}  // namespace dflash::wire
