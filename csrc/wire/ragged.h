// The index part of a request (weights, row counts, local expert ids) as a private, validated copy.
// Kernels index with it, so it is first taken out of memory that the peer can write, and then
// checked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/payload.h"

namespace dflash::wire {

// Keeps its memory from request to request. Not thread-safe.
class RaggedIndex {
 public:
  // Copies the index part of `payload`, which `layout` describes for num_rows and num_pairs, and
  // validates the copy: every count is in 1..kMaxPairsPerRow, the counts add up to num_pairs, every
  // id is below num_local_experts, and the ids of a row ascend (equal ones may repeat). Memory is
  // allocated only for a request larger than every one before. The spans below stay valid until the
  // next assign(). Errors: kProtocol naming field, row, what was found and what is allowed; the
  // spans are then empty.
  Status assign(const RequestLayout& layout, uint32_t num_rows, uint32_t num_pairs,
                uint32_t num_local_experts, std::span<const std::byte> payload);

  std::span<const float> weights() const { return weights_; }                       // [num_pairs]
  std::span<const uint16_t> row_counts() const { return row_counts_; }              // [num_rows]
  std::span<const uint16_t> local_expert_ids() const { return local_expert_ids_; }  // [num_pairs]

 private:
  Status validate(uint32_t num_pairs, uint32_t num_local_experts) const;
  void clear();

  std::vector<float> weights_;
  std::vector<uint16_t> row_counts_;
  std::vector<uint16_t> local_expert_ids_;
};

}  // namespace dflash::wire
