// Any bytes as a request payload give an index whose every entry is in range, or an error and an
// empty index. The first bytes of the input choose the counts, as a peer's header would.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "wire/payload.h"
#include "wire/ragged.h"

namespace {

using namespace dflash;

void require(bool holds) {
  if (!holds) std::abort();  // a finding
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  if (num_bytes < 8) return 0;
  const uint32_t num_rows = data[0], num_pairs = data[1] + 256u * (data[2] % 4u),
                 row_width = data[3], num_experts = data[4];
  const auto dtype = static_cast<Dtype>(data[5] % kNumDtypes);
  const auto layout = wire::RequestLayout::of(num_rows, num_pairs, row_width, dtype);
  if (!layout.ok()) {
    require(!layout.error().message.empty());
    return 0;
  }
  std::vector<std::byte> payload(layout.value().payload_bytes);
  // a length that does not fit the counts
  if (data[6] % 8 == 0) payload.resize(payload.size() / 2);
  std::memcpy(payload.data(), data + 8, std::min(payload.size(), num_bytes - 8));
  wire::RaggedIndex index;
  if (!index.assign(layout.value(), num_rows, num_pairs, num_experts, payload).ok()) {
    require(index.weights().empty() && index.row_counts().empty() &&
            index.local_expert_ids().empty());
    return 0;
  }
  const auto counts = index.row_counts();
  require(counts.size() == num_rows && index.weights().size() == num_pairs);
  require(std::accumulate(counts.begin(), counts.end(), 0u) == num_pairs);
  for (const uint16_t id : index.local_expert_ids()) require(id < num_experts);
  return 0;
}
