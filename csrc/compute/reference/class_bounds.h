// Where the outputs must lie of a class whose bits are a card's (NumericsFacts::is_bounded),
// whichever card computes them. The enclosure is in float64. It is derived from what the class
// fixes (operands and intermediate rows are rounded to bf16 or f16) and from a bound on what the
// class leaves to the instruction (docs/decisions/0015, 0019).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

// The lowest and highest value that each output may have.
struct OutputBounds {
  // [num_rows, out_size], bounds of the sum before it is rounded to the reply dtype.
  std::vector<double> low, high;
};

// The bounds of a batch whose inputs and results are finite. `experts` are indexed by local id and
// given as they are loaded; the layer computes with them in `formats`.
OutputBounds class_bounds(NumericsClass numerics, const FfnSpec& spec,
                          std::span<const ExpertWeights> experts, ResidentFormats formats,
                          const ForwardArgs& args);

}  // namespace dflash::compute
