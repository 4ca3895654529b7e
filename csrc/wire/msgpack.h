// The part of msgpack that control messages with closed schemas need: nil, booleans, integers,
// floats, text, binaries, lists and maps with integer keys. Extension types are refused.
//
// Reading is total: any bytes give a map, or an error (kProtocol) that says what is wrong. Nothing
// nests deeper than a list of scalars inside the outer map, so that no input makes a reader
// recurse.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"

namespace dflash::wire {

// A scalar. Text and binaries are views into the bytes that were read. An integer is negative
// exactly where it is held as int64_t.
struct MsgpackNil {};
using MsgpackBytes = std::span<const std::byte>;
using MsgpackScalar =
    std::variant<MsgpackNil, bool, uint64_t, int64_t, double, std::string_view, MsgpackBytes>;
// What stands under a key of the outer map.
using MsgpackValue = std::variant<MsgpackScalar, std::vector<MsgpackScalar>>;
using MsgpackMap = std::map<uint64_t, MsgpackValue>;

// The most keys of a map. The largest message has 17.
inline constexpr uint32_t kMaxMsgpackKeys = 64;

// Reads a whole message, which is one map. Errors: kProtocol where it ends early or something
// follows it, for a key that is no unsigned integer or comes twice, for a list within a list, a map
// within the map, and for text that is not UTF-8 or has a zero byte, which C would take for its
// end.
Result<MsgpackMap> read_msgpack_map(std::span<const std::byte> bytes);

// Writes the shortest form of each value, as the encoder of the Python side does.
class MsgpackWriter {
 public:
  void map(uint32_t num_keys);
  void array(uint32_t num_items);
  void boolean(bool value) { byte(value ? 0xc3 : 0xc2); }
  void uint(uint64_t value);
  void real(double value);
  void text(std::string_view value);
  void binary(std::span<const std::byte> value);
  std::vector<std::byte> take() && { return std::move(bytes_); }

 private:
  void byte(uint32_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
  void big_endian(uint64_t value, int num_bytes);
  void append(std::span<const std::byte> value) {
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }

  std::vector<std::byte> bytes_;
};

// Whether the text is well-formed UTF-8 without a zero byte.
bool is_plain_utf8(std::string_view text);

}  // namespace dflash::wire
