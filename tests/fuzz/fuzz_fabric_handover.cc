// Any bytes as an offer of fabrics, or as the answer to one, give fields within their limits that
// encode to the same bytes again, or a protocol error.
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "transport/fabric/fabric_handover.h"

namespace {

using namespace dflash;

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

bool is_within(size_t num_bytes, size_t most) { return num_bytes > 0 && num_bytes <= most; }

template <class Decoded>
bool is_refused(const Result<Decoded>& decoded) {
  if (decoded.ok()) return false;
  require(decoded.error().code == ErrorCode::kProtocol && !decoded.error().message.empty());
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  if (num_bytes > 0) std::memcpy(bytes.data(), data, num_bytes);
  const auto offers = transport::decode_fabric_offer(bytes);
  if (!is_refused(offers)) {
    require(is_within(offers.value().size(), transport::kMaxFabricOffers));
    for (const auto& one : offers.value()) {
      require(is_within(one.provider.name.size(), transport::kMaxFabricNameBytes));
      require(is_within(one.address.size(), transport::kMaxFabricAddressBytes));
    }
    require(transport::encode_fabric_offer(offers.value()) == bytes);
    require(bytes.size() <= transport::kMaxHandoverBytes);
  }
  const auto answer = transport::decode_fabric_answer(bytes);
  if (!is_refused(answer)) {
    require(is_within(answer.value().address.size(), transport::kMaxFabricAddressBytes));
    require(transport::encode_fabric_answer(answer.value()) == bytes);
  }
  return 0;
}
