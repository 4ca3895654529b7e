// Where the outputs of a class must lie whose bits are a card's (NumericsFacts::is_bounded),
// whichever card computes them: an enclosure in float64, derived from what the class fixes
// (operands and intermediate rows rounded, to bf16 or f16) and from a bound on what it leaves to
// the instruction (docs/decisions/0015, 0019).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

struct OutputBounds {
  // [num_rows, out_size], of the sum before it is rounded to the reply dtype
  std::vector<double> low, high;
};

// For finite inputs and results. `experts` by local id, as they are loaded; they are computed with
// in `formats`.
OutputBounds class_bounds(NumericsClass numerics, const FfnSpec& spec,
                          std::span<const ExpertWeights> experts, ResidentFormats formats,
                          const ForwardArgs& args);

}  // namespace dflash::compute
