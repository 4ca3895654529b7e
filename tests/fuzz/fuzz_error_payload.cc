// Any bytes as an error's payload give a known code and printable text, or a protocol error.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "wire/payload.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  using namespace dflash;
  std::vector<std::byte> payload(num_bytes);
  if (num_bytes > 0) std::memcpy(payload.data(), data, num_bytes);
  const auto decoded = wire::decode_error(payload);
  if (!decoded.ok()) {
    require(decoded.error().code == ErrorCode::kProtocol && !decoded.error().message.empty());
    return 0;
  }
  const wire::RemoteError& error = decoded.value();
  require(error.code >= ErrorCode::kInvalidArgument && error.code <= ErrorCode::kClosed);
  require(error.text.size() == num_bytes - wire::kErrorPrefixBytes);
  require(std::all_of(error.text.begin(), error.text.end(),
                      [](char c) { return c >= ' ' && c <= '~'; }));
  return 0;
}
