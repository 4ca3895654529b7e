// Any bytes as a message of a hand-over give one whose fields are within their limits, and which
// encodes to bytes that decode to it again, or a protocol error.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "wire/handover_messages.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  using namespace dflash;
  std::vector<std::byte> bytes(num_bytes);
  if (num_bytes > 0) std::memcpy(bytes.data(), data, num_bytes);
  const auto decoded = wire::decode_handover(bytes);
  if (!decoded.ok()) {
    require(decoded.error().code == ErrorCode::kProtocol && !decoded.error().message.empty());
    return 0;
  }
  const auto encoded = wire::encode_handover(decoded.value());
  require(encoded.ok() && encoded.value().size() <= wire::kMaxControlFrameBytes);
  const auto again = wire::decode_handover(encoded.value());
  require(again.ok() && again.value().index() == decoded.value().index());
  require(wire::encode_handover(again.value()).value() == encoded.value());
  return 0;
}
