// msgpack by its specification (github.com/msgpack/msgpack), read with a cursor that never
// passes the end.
// SPDX-License-Identifier: Apache-2.0
#include "wire/msgpack.h"

#include <bit>
#include <string>
#include <utility>

namespace dflash::wire {
namespace {

Error broken(std::string what) {
  return Error{ErrorCode::kProtocol, "not a msgpack message: " + std::move(what)};
}

class Cursor {
 public:
  explicit Cursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool is_at_end() const { return at_ == bytes_.size(); }
  size_t left() const { return bytes_.size() - at_; }
  // Reads a big-endian number of 1, 2, 4 or 8 bytes.
  Result<uint64_t> number(size_t num_bytes) {
    if (left() < num_bytes) return broken("it ends inside a value");
    uint64_t value = 0;
    for (size_t i = 0; i < num_bytes; ++i)
      value = value << 8 | std::to_integer<uint64_t>(bytes_[at_ + i]);
    at_ += num_bytes;
    return value;
  }
  Result<MsgpackBytes> take(uint64_t num_bytes) {
    if (left() < num_bytes) return broken("it ends inside a value");
    const auto taken = bytes_.subspan(at_, static_cast<size_t>(num_bytes));
    at_ += static_cast<size_t>(num_bytes);
    return taken;
  }

 private:
  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

// What the first byte of a value says: its family, and a number that is its value, or the length of
// what follows.
enum class Family { kNil, kBool, kUint, kInt, kFloat, kText, kBinary, kArray, kMap };
struct Head {
  Family family;
  uint64_t number = 0;  // for kInt the two's complement, for kFloat the bits of the double
};

uint64_t sign_extended(uint64_t value, size_t num_bytes) {
  const unsigned shift = static_cast<unsigned>(64 - 8 * num_bytes);
  return static_cast<uint64_t>(static_cast<int64_t>(value << shift) >> shift);
}

Result<Head> with_number(Cursor& cursor, Family family, size_t num_bytes) {
  auto number = cursor.number(num_bytes);
  if (!number.ok()) return std::move(number).error();
  uint64_t value = number.value();
  if (family == Family::kInt) value = sign_extended(value, num_bytes);
  if (family == Family::kFloat && num_bytes == 4)
    value = std::bit_cast<uint64_t>(
        static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(value))));
  return Head{family, value};
}

Result<Head> read_head(Cursor& cursor) {
  const auto first = cursor.number(1);
  if (!first.ok()) return first.error();
  const uint64_t lead = first.value();
  if (lead <= 0x7f) return Head{Family::kUint, lead};
  if (lead <= 0x8f) return Head{Family::kMap, lead & 0x0f};
  if (lead <= 0x9f) return Head{Family::kArray, lead & 0x0f};
  if (lead <= 0xbf) return Head{Family::kText, lead & 0x1f};
  if (lead >= 0xe0) return Head{Family::kInt, sign_extended(lead, 1)};
  switch (lead) {
    case 0xc0: return Head{Family::kNil};
    case 0xc2:
    case 0xc3: return Head{Family::kBool, lead & 1};
    case 0xc4: return with_number(cursor, Family::kBinary, 1);
    case 0xc5: return with_number(cursor, Family::kBinary, 2);
    case 0xc6: return with_number(cursor, Family::kBinary, 4);
    case 0xca: return with_number(cursor, Family::kFloat, 4);
    case 0xcb: return with_number(cursor, Family::kFloat, 8);
    case 0xcc: return with_number(cursor, Family::kUint, 1);
    case 0xcd: return with_number(cursor, Family::kUint, 2);
    case 0xce: return with_number(cursor, Family::kUint, 4);
    case 0xcf: return with_number(cursor, Family::kUint, 8);
    case 0xd0: return with_number(cursor, Family::kInt, 1);
    case 0xd1: return with_number(cursor, Family::kInt, 2);
    case 0xd2: return with_number(cursor, Family::kInt, 4);
    case 0xd3: return with_number(cursor, Family::kInt, 8);
    case 0xd9: return with_number(cursor, Family::kText, 1);
    case 0xda: return with_number(cursor, Family::kText, 2);
    case 0xdb: return with_number(cursor, Family::kText, 4);
    case 0xdc: return with_number(cursor, Family::kArray, 2);
    case 0xdd: return with_number(cursor, Family::kArray, 4);
    case 0xde: return with_number(cursor, Family::kMap, 2);
    case 0xdf: return with_number(cursor, Family::kMap, 4);
    default:   return broken("type byte " + std::to_string(lead) + " is an extension or none");
  }
}

Result<MsgpackScalar> read_scalar(Cursor& cursor, const Head& head) {
  switch (head.family) {
    case Family::kNil:  return MsgpackScalar(MsgpackNil{});
    case Family::kBool: return MsgpackScalar(head.number != 0);
    case Family::kUint: return MsgpackScalar(head.number);
    case Family::kInt:  {
      const auto value = static_cast<int64_t>(head.number);
      return value < 0 ? MsgpackScalar(value) : MsgpackScalar(head.number);
    }
    case Family::kFloat:  return MsgpackScalar(std::bit_cast<double>(head.number));
    case Family::kText:
    case Family::kBinary: {
      const auto taken = cursor.take(head.number);
      if (!taken.ok()) return taken.error();
      if (head.family == Family::kBinary) return MsgpackScalar(taken.value());
      const std::string_view text(reinterpret_cast<const char*>(taken.value().data()),
                                  taken.value().size());
      if (!is_plain_utf8(text)) return broken("a text is not UTF-8, or has a zero byte");
      return MsgpackScalar(text);
    }
    case Family::kArray:
    case Family::kMap:   break;
  }
  return broken("a list or map stands where only a scalar may");
}

Result<MsgpackValue> read_value(Cursor& cursor) {
  const auto head = read_head(cursor);
  if (!head.ok()) return head.error();
  if (head.value().family != Family::kArray) {
    auto scalar = read_scalar(cursor, head.value());
    if (!scalar.ok()) return std::move(scalar).error();
    return MsgpackValue(std::move(scalar).value());
  }
  // Every item has at least one byte, so that a list never reserves more than its message allows.
  if (head.value().number > cursor.left()) return broken("it ends inside a list");
  std::vector<MsgpackScalar> items;
  items.reserve(static_cast<size_t>(head.value().number));
  for (uint64_t i = 0; i < head.value().number; ++i) {
    const auto item_head = read_head(cursor);
    if (!item_head.ok()) return item_head.error();
    auto item = read_scalar(cursor, item_head.value());
    if (!item.ok()) return std::move(item).error();
    items.push_back(std::move(item).value());
  }
  return MsgpackValue(std::move(items));
}

// The number of bytes of the UTF-8 sequence that `text` begins with, 0 where it is none or is the
// zero byte (RFC 3629, section 4).
size_t utf8_sequence(std::string_view text) {
  const auto at = [&](size_t i) {
    return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0};
  };
  const auto follows = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const uint8_t lead = at(0), second = at(1);
  if (lead == 0) return 0;
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead <= 0xef) {
    const bool is_overlong = lead == 0xe0 && second < 0xa0;
    const bool is_surrogate = lead == 0xed && second > 0x9f;
    return follows(1) && follows(2) && !is_overlong && !is_surrogate ? 3 : 0;
  }
  if (lead >= 0xf0 && lead <= 0xf4) {
    const bool is_overlong = lead == 0xf0 && second < 0x90;
    const bool is_beyond = lead == 0xf4 && second > 0x8f;
    return follows(1) && follows(2) && follows(3) && !is_overlong && !is_beyond ? 4 : 0;
  }
  return 0;
}

}  // namespace

bool is_plain_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t num_bytes = utf8_sequence(text);
    if (num_bytes == 0) return false;
    text.remove_prefix(num_bytes);
  }
  return true;
}

Result<MsgpackMap> read_msgpack_map(std::span<const std::byte> bytes) {
  Cursor cursor(bytes);
  const auto head = read_head(cursor);
  if (!head.ok()) return head.error();
  if (head.value().family != Family::kMap) return broken("it is no map");
  if (head.value().number > kMaxMsgpackKeys)
    return broken("its map has " + std::to_string(head.value().number) + " keys; allowed are " +
                  std::to_string(kMaxMsgpackKeys));
  MsgpackMap map;
  for (uint64_t i = 0; i < head.value().number; ++i) {
    const auto key = read_head(cursor);
    if (!key.ok()) return key.error();
    const bool is_number =
        key.value().family == Family::kUint ||
        (key.value().family == Family::kInt && static_cast<int64_t>(key.value().number) >= 0);
    if (!is_number) return broken("a key of its map is no unsigned integer");
    auto value = read_value(cursor);
    if (!value.ok()) return std::move(value).error();
    if (!map.emplace(key.value().number, std::move(value).value()).second)
      return broken("key " + std::to_string(key.value().number) + " comes twice");
  }
  if (!cursor.is_at_end())
    return broken(std::to_string(cursor.left()) + " bytes follow the message");
  return map;
}

void MsgpackWriter::big_endian(uint64_t value, int num_bytes) {
  for (int i = num_bytes - 1; i >= 0; --i) byte(static_cast<uint32_t>(value >> (8 * i) & 0xff));
}

void MsgpackWriter::map(uint32_t num_keys) {
  if (num_keys < 16) return byte(0x80 | num_keys);
  byte(num_keys <= 0xffff ? 0xde : 0xdf);
  big_endian(num_keys, num_keys <= 0xffff ? 2 : 4);
}

void MsgpackWriter::array(uint32_t num_items) {
  if (num_items < 16) return byte(0x90 | num_items);
  byte(num_items <= 0xffff ? 0xdc : 0xdd);
  big_endian(num_items, num_items <= 0xffff ? 2 : 4);
}

void MsgpackWriter::uint(uint64_t value) {
  if (value < 0x80) return byte(static_cast<uint32_t>(value));
  if (value <= 0xff) {
    byte(0xcc);
    big_endian(value, 1);
  } else if (value <= 0xffff) {
    byte(0xcd);
    big_endian(value, 2);
  } else if (value <= 0xffff'ffff) {
    byte(0xce);
    big_endian(value, 4);
  } else {
    byte(0xcf);
    big_endian(value, 8);
  }
}

void MsgpackWriter::real(double value) {
  byte(0xcb);
  big_endian(std::bit_cast<uint64_t>(value), 8);
}

void MsgpackWriter::text(std::string_view value) {
  if (value.size() < 32) {
    byte(static_cast<uint32_t>(0xa0 | value.size()));
  } else if (value.size() <= 0xff) {
    byte(0xd9);
    big_endian(value.size(), 1);
  } else {
    byte(value.size() <= 0xffff ? 0xda : 0xdb);
    big_endian(value.size(), value.size() <= 0xffff ? 2 : 4);
  }
  append(std::as_bytes(std::span(value)));
}

void MsgpackWriter::binary(std::span<const std::byte> value) {
  if (value.size() <= 0xff) {
    byte(0xc4);
    big_endian(value.size(), 1);
  } else {
    byte(value.size() <= 0xffff ? 0xc5 : 0xc6);
    big_endian(value.size(), value.size() <= 0xffff ? 2 : 4);
  }
  append(value);
}

}  // namespace dflash::wire
