// The hand-over's messages, against the bytes that the Python side makes of them
// (tests/golden/handover), and every way in which they can be wrong.
// SPDX-License-Identifier: Apache-2.0
#include "wire/handover_messages.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "failed.h"
#include "wire/msgpack.h"

namespace dflash::wire {
namespace {

using Bytes = std::vector<std::byte>;

Bytes unhex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(text.substr(i, 2), nullptr, 16)));
  return bytes;
}

// Name and bytes of every message of the golden file.
std::vector<std::pair<std::string, Bytes>> golden() {
  const auto path =
      std::filesystem::path(__FILE__).parent_path() / "../../golden/handover/messages.txt";
  std::ifstream file(path);
  REQUIRE_MESSAGE(file.good(), "cannot open ", path.string());
  std::vector<std::pair<std::string, Bytes>> messages;
  std::string name, hex;
  while (file >> name >> hex) messages.emplace_back(name, unhex(hex));
  return messages;
}

std::string refusal(const std::string& hex) {
  const auto decoded = decode_handover(unhex(hex));
  REQUIRE(decoded == Failed(ErrorCode::kProtocol));
  return decoded.error().message;
}

TEST_CASE("every golden message is read, and written again with the same bytes") {
  const auto messages = golden();
  REQUIRE(messages.size() == std::variant_size_v<HandoverMessage>);
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& [name, bytes] = messages[i];
    CAPTURE(name);
    const auto decoded = decode_handover(bytes);
    REQUIRE_MESSAGE(decoded.ok(), (decoded.ok() ? std::string() : decoded.error().message));
    CHECK(decoded.value().index() == i);
    CHECK(handover_message_name(decoded.value()) == name);
    CHECK(encode_handover(decoded.value()).value() == bytes);
  }
  const auto layer = std::get<PlannedLayer>(decode_handover(messages[4].second).value());
  CHECK(layer.name == "blk.5");
  CHECK(layer.alpha == 1.702);
  CHECK(layer.up_offset == -1.0);
  CHECK(layer.has_gate_up_bias);
  const auto shard = std::get<PlannedShard>(decode_handover(messages[5].second).value());
  CHECK(shard.weights_fingerprint == (uint64_t{1} << 63) + 5);
  CHECK(shard.expert_ranges == std::vector<uint64_t>{0, 64, 70, 1});
  CHECK(std::get<Counted>(decode_handover(messages[14].second).value()).compute_ns == ~uint64_t{0});
}

TEST_CASE("every beginning of a message is refused, and so is one with more behind it") {
  for (const auto& [name, bytes] : golden()) {
    CAPTURE(name);
    for (size_t length = 0; length < bytes.size(); ++length)
      CHECK_FALSE(decode_handover(std::span(bytes).first(length)).ok());
    Bytes longer = bytes;
    longer.push_back(std::byte{0xc0});
    CHECK_FALSE(decode_handover(longer).ok());
  }
}

TEST_CASE("every other byte in the place of each gives a message or a protocol error") {
  for (const auto& [name, bytes] : golden()) {
    for (size_t at = 0; at < std::min<size_t>(bytes.size(), 64); ++at) {
      for (int value = 0; value < 256; ++value) {
        Bytes changed = bytes;
        changed[at] = static_cast<std::byte>(value);
        const auto decoded = decode_handover(changed);
        if (decoded.ok()) {
          CHECK(encode_handover(decoded.value()).ok());
        } else if (decoded.error().code != ErrorCode::kProtocol) {
          FAIL("another code than kProtocol");
        }
      }
    }
  }
}

TEST_CASE("what is not a closed message is refused by name") {
  CHECK(refusal("") == "not a msgpack message: it ends inside a value");
  CHECK(refusal("90") == "not a msgpack message: it is no map");
  CHECK(refusal("8100") == "not a msgpack message: it ends inside a value");
  CHECK(refusal("80") == "message type: allowed are 1..15 under key 0");
  CHECK(refusal("810010") == "message type: allowed are 1..15 under key 0");
  CHECK(refusal("8100a0") == "message type: allowed are 1..15 under key 0");
  CHECK(refusal("82000b000b") == "not a msgpack message: key 0 comes twice");
  CHECK(refusal("82000bff00") == "not a msgpack message: a key of its map is no unsigned integer");
  CHECK(refusal("81a0c0") == "not a msgpack message: a key of its map is no unsigned integer");
  CHECK(refusal("82000b0700") == "message Ready: unknown field 7");
  CHECK(refusal("82000b01d40100") ==
        "not a msgpack message: type byte 212 is an extension or none");
  CHECK(refusal("82000b0180") ==
        "not a msgpack message: a list or map stands where only a scalar may");
  CHECK(refusal("82000b019190") ==
        "not a msgpack message: a list or map stands where only a scalar may");
  CHECK(refusal("df0000ffff") == "not a msgpack message: its map has 65535 keys; allowed are 64");
  CHECK(refusal("82000201dd7fffffff") == "not a msgpack message: it ends inside a list");
  CHECK(refusal("82000201db7fffffff") == "not a msgpack message: it ends inside a value");
}

TEST_CASE("fields of another kind or outside their limits are refused by name") {
  CHECK(refusal("82000201c0").find("message RefuseHandover: field text: allowed is text") == 0);
  CHECK(refusal("82000201a2c328") ==
        "not a msgpack message: a text is not UTF-8, or has a zero byte");
  CHECK(refusal("82000201a100") ==
        "not a msgpack message: a text is not UTF-8, or has a zero byte");
  CHECK(refusal("83000d01ff02a0") == Has{"field worker: allowed is an integer"});
  CHECK(refusal("83000d01cf000000010000000002a0") == Has{"field worker"});
  CHECK(refusal("83000d01cb3ff000000000000002a0") == Has{"field worker"});
  CHECK(refusal("82000d0101") == Has{"field reason: is missing"});
  CHECK(refusal("83000d019002a0") == Has{"field worker: found a list"});
  CHECK(refusal("8300010101"
                "02c40100")
            .find("binary of exactly 32 bytes") != std::string::npos);
  const std::string layer = "8600060100020003000400";
  CHECK(refusal(layer + "0501") == Has{"field expert_ranges: allowed is a list"});
  CHECK(refusal(layer + "0591ff") == Has{"field expert_ranges: allowed are integers"});
}

TEST_CASE("integers in any form are read, whole numbers pass for floats, and NaN does not") {
  const auto gone = [](const std::string& number) {
    return decode_handover(unhex("83000d01" + number + "02a0"));
  };
  for (const char* number : {"07", "cc07", "cd0007", "ce00000007", "cf0000000000000007", "d007",
                             "d10007", "d200000007", "d30000000000000007"}) {
    CAPTURE(std::string(number));
    REQUIRE(gone(number).ok());
    CHECK(std::get<WorkerGone>(gone(number).value()).worker == 7);
  }
  const auto layer = [](const std::string& alpha) {
    std::string hex =
        "de0011"
        "0005"
        "0100"
        "02a0";
    for (const char* key : {"03", "04", "05", "06", "07", "08", "09", "0a"})
      hex += std::string(key) + "00";
    return decode_handover(unhex(hex + "0b" + alpha +
                                 "0c00"
                                 "0d00"
                                 "0e00"
                                 "0fc2"
                                 "10c3"));
  };
  CHECK(std::get<PlannedLayer>(layer("02").value()).alpha == 2.0);
  CHECK(std::get<PlannedLayer>(layer("fe").value()).alpha == -2.0);
  CHECK(std::get<PlannedLayer>(layer("ca3fc00000").value()).alpha == 1.5);
  CHECK_FALSE(layer("ca7fc00000").ok());          // NaN
  CHECK_FALSE(layer("cb7ff0000000000000").ok());  // infinity
  CHECK_FALSE(layer("c3").ok());
}

TEST_CASE("a text that is too long is cut at a character, other fields are refused") {
  std::string reason(1023, 'x');
  reason += "\xe2\x80\x93 and so on";  // a dash of three bytes, of which one would fit
  const auto encoded = encode_handover(WorkerGone{1, reason});
  REQUIRE(encoded.ok());
  CHECK(std::get<WorkerGone>(decode_handover(encoded.value()).value()).reason ==
        std::string(1023, 'x'));
  CHECK_FALSE(encode_handover(PathOffered{0, 1, Bytes(4097), 0}).ok());
  CHECK_FALSE(encode_handover(RefuseHandover{"\xff"}).ok());
}

}  // namespace
}  // namespace dflash::wire
