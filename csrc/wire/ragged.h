// A request's index part - weights, row counts, local expert ids - as a private, validated copy.
// Kernels index with it, so it is taken out of peer-writable memory first and checked after.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/result.h"
#include "wire/payload.h"

namespace dflash::wire {

class RaggedIndex {
 public:
  // Copies the index part of `payload` (laid out by `layout` for num_rows and num_pairs) and
  // validates the copy: every count in 1..kMaxPairsPerRow, counts sum to num_pairs, every id <
  // num_local_experts, ids of a row ascending (equal ones may repeat). Allocates only when a
  // request is larger than every one before. The spans below stay valid until the next assign().
  // Errors: kProtocol naming field, row, what was found and what is allowed; the spans are empty
  // then.
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
