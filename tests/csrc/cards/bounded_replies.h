// Replies of the classes whose bits are a card's, against the bounds of their class.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>
#include <vector>

#include "compute/reference/reference.h"
#include "compute/toy_experts.h"

namespace dflash::compute::toy {

inline OutputBounds bounds_of(NumericsClass numerics, const FfnSpec& spec,
                              const std::vector<ExpertWeights>& weights, ResidentFormats formats,
                              const Batch& batch) {
  std::vector<std::byte> unused;
  const std::vector<std::byte> rows = encode(batch.row_dtype, batch.rows);
  return class_bounds(numerics, spec, weights, formats, batch.args(rows, unused));
}

// How many values of a float32 reply are outside of the bounds.
inline size_t count_outside(const OutputBounds& bounds, const std::vector<std::byte>& reply) {
  size_t outside = 0;
  for (size_t i = 0; i < bounds.low.size(); ++i) {
    float value;
    std::memcpy(&value, reply.data() + 4 * i, 4);
    if (!(static_cast<float>(bounds.low[i]) <= value &&
          value <= static_cast<float>(bounds.high[i])))
      ++outside;
  }
  return outside;
}

}  // namespace dflash::compute::toy
