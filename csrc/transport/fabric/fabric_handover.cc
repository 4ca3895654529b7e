// SPDX-License-Identifier: Apache-2.0
#include "transport/fabric/fabric_handover.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace dflash::transport {
namespace {

class Writer {
 public:
  template <class Integer>
  void number(Integer value) {
    const auto* const bytes = reinterpret_cast<const std::byte*>(&value);
    bytes_.insert(bytes_.end(), bytes, bytes + sizeof value);
  }
  template <class Length>
  void string(std::span<const std::byte> bytes) {
    number(static_cast<Length>(bytes.size()));
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  template <class Integer>
  Integer number() {
    Integer value{};
    const auto bytes = raw(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
  }
  template <class Length>
  std::span<const std::byte> string(size_t max_bytes) {
    const size_t length = number<Length>();
    if (length == 0 || length > max_bytes) is_broken_ = true;
    return raw(length);
  }
  // Whether every field was there and nothing follows.
  bool is_whole() const { return !is_broken_ && left_.empty(); }

 private:
  std::span<const std::byte> raw(size_t num_bytes) {
    if (is_broken_ || num_bytes > left_.size()) {
      is_broken_ = true;
      return {};
    }
    const auto taken = left_.first(num_bytes);
    left_ = left_.subspan(num_bytes);
    return taken;
  }

  std::span<const std::byte> left_;
  bool is_broken_ = false;
};

// Errors show the names, also those of a peer, and libfabric has no others.
bool is_plain(const std::string& name) {
  return std::all_of(name.begin(), name.end(), [](char one) { return one > ' ' && one < '\x7f'; });
}

Error misfit(const char* what) {
  return {ErrorCode::kProtocol,
          std::string("transport fabric: its ") + what + " is not of this form"};
}

}  // namespace

std::vector<std::byte> encode_fabric_offer(std::span<const FabricOffered> offers) {
  Writer writer;
  writer.number(static_cast<uint8_t>(offers.size()));
  for (const FabricOffered& one : offers) {
    writer.string<uint8_t>(std::as_bytes(std::span(one.provider.name)));
    writer.number(one.provider.protocol);
    writer.number(one.provider.protocol_version);
    writer.string<uint16_t>(one.address);
  }
  return writer.take();
}

std::vector<std::byte> encode_fabric_answer(const FabricAnswered& answer) {
  Writer writer;
  writer.number(answer.which);
  writer.string<uint16_t>(answer.address);
  return writer.take();
}

Result<std::vector<FabricOffered>> decode_fabric_offer(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  const size_t count = reader.number<uint8_t>();
  if (count == 0 || count > kMaxFabricOffers) return misfit("offer");
  std::vector<FabricOffered> offers(count);
  for (FabricOffered& one : offers) {
    const auto name = reader.string<uint8_t>(kMaxFabricNameBytes);
    one.provider.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    if (!is_plain(one.provider.name)) return misfit("offer");
    one.provider.protocol = reader.number<uint32_t>();
    one.provider.protocol_version = reader.number<uint32_t>();
    const auto address = reader.string<uint16_t>(kMaxFabricAddressBytes);
    one.address.assign(address.begin(), address.end());
  }
  if (!reader.is_whole()) return misfit("offer");
  return offers;
}

Result<FabricAnswered> decode_fabric_answer(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  FabricAnswered answer;
  answer.which = reader.number<uint8_t>();
  const auto address = reader.string<uint16_t>(kMaxFabricAddressBytes);
  answer.address.assign(address.begin(), address.end());
  if (!reader.is_whole()) return misfit("answer");
  return answer;
}

}  // namespace dflash::transport
