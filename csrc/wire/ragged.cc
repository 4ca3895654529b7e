// The index is copied first and the copy is validated, so that what is checked is what is used.
// SPDX-License-Identifier: Apache-2.0
#include "wire/ragged.h"

#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "wire/limits.h"
#include "wire/little_endian.h"

namespace dflash::wire {
namespace {

// Fills `out` with `count` little-endian elements from `offset` on. The caller has checked that
// they lie inside `payload`.
template <class T>
void copy_le(std::span<const std::byte> payload, uint64_t offset, uint32_t count,
             std::vector<T>& out) {
  out.resize(count);
  const auto source = payload.subspan(offset, count * sizeof(T));
  if constexpr (std::endian::native == std::endian::little) {
    std::memcpy(out.data(), source.data(), source.size());
  } else {
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
    for (uint32_t i = 0; i < count; ++i)
      out[i] = std::bit_cast<T>(load_le<Bits>(source, i * sizeof(T)));
  }
}

Error refuse(const std::string& what, uint64_t found, const std::string& allowed) {
  return {ErrorCode::kProtocol,
          "request index: " + what + " is " + std::to_string(found) + "; allowed: " + allowed};
}

}  // namespace

Status RaggedIndex::assign(const RequestLayout& layout, uint32_t num_rows, uint32_t num_pairs,
                           uint32_t num_local_experts, std::span<const std::byte> payload) {
  clear();
  if (payload.size() != layout.payload_bytes) {
    return refuse("payload length", payload.size(),
                  std::to_string(layout.payload_bytes) + " for its counts");
  }
  copy_le(payload, layout.weights_offset, num_pairs, weights_);
  copy_le(payload, layout.row_counts_offset, num_rows, row_counts_);
  copy_le(payload, layout.local_ids_offset, num_pairs, local_expert_ids_);
  Status verdict = validate(num_pairs, num_local_experts);
  if (!verdict.ok()) clear();
  return verdict;
}

Status RaggedIndex::validate(uint32_t num_pairs, uint32_t num_local_experts) const {
  uint32_t pair = 0;
  for (uint32_t row = 0; row < row_counts_.size(); ++row) {
    const uint32_t count = row_counts_[row];
    if (count < 1 || count > kMaxPairsPerRow) {
      return refuse("row_counts[" + std::to_string(row) + "]", count,
                    "1.." + std::to_string(kMaxPairsPerRow));
    }
    if (count > num_pairs - pair) {
      return refuse("sum of row_counts up to row " + std::to_string(row), uint64_t{pair} + count,
                    "num_pairs = " + std::to_string(num_pairs));
    }
    uint32_t least = 0;
    for (const uint32_t end = pair + count; pair < end; ++pair) {
      const uint32_t id = local_expert_ids_[pair];
      if (id >= num_local_experts) {
        return refuse(
            "local_expert_ids[" + std::to_string(pair) + "] of row " + std::to_string(row), id,
            "below num_local_experts = " + std::to_string(num_local_experts));
      }
      if (id < least) {
        return refuse(
            "local_expert_ids[" + std::to_string(pair) + "] of row " + std::to_string(row), id,
            "ascending within a row, at least " + std::to_string(least));
      }
      least = id;
    }
  }
  if (pair != num_pairs)
    return refuse("sum of row_counts", pair, "num_pairs = " + std::to_string(num_pairs));
  return ok();
}

void RaggedIndex::clear() {
  weights_.clear();
  row_counts_.clear();
  local_expert_ids_.clear();
}

}  // namespace dflash::wire
