// The sum of an expert's memory: its panels and biases, which are pieces that follow each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/checksum.h"
#include "compute/yielding_progress.h"

namespace dflash::store {

// What is summed up between two looks at whether to stop: a tenth of a millisecond.
inline constexpr size_t kScrubStepBytes = size_t{1} << 20;
using Pieces = std::array<std::span<const std::byte>, 3>;

inline uint64_t total_bytes(const Pieces& pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}

// Returns nothing where `stop` was set meanwhile.
inline std::optional<uint32_t> sum_of(const Pieces& pieces, const std::atomic<bool>* stop,
                                      compute::YieldingProgress* progress = nullptr) {
  Checksum sum;
  for (const auto& piece : pieces) {
    for (size_t at = 0; at < piece.size(); at += kScrubStepBytes) {
      if (stop != nullptr && stop->load(std::memory_order_relaxed)) return std::nullopt;
      if (progress != nullptr) progress->count_and_yield();
      sum.update(piece.subspan(at, std::min(kScrubStepBytes, piece.size() - at)));
    }
  }
  return sum.finish();
}

}  // namespace dflash::store
