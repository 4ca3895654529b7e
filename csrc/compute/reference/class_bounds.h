// Bounds for the outputs of a bounded class (NumericsFacts::is_bounded): one whose bits depend on
// the card that computes them. For a batch this gives, in float64, an interval that holds each
// output on every card. It follows from what the class fixes (operands and intermediate rows are
// rounded to bf16 or f16) and from a bound on what the class leaves to the matrix instruction,
// which is the order and precision of its sums (docs/decisions/0015, 0019).
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

// The inputs and results must be finite. `experts` are indexed by local id and given as they are
// loaded; `formats` are those in which a worker keeps them and computes.
OutputBounds class_bounds(NumericsClass numerics, const FfnSpec& spec,
                          std::span<const ExpertWeights> experts, ResidentFormats formats,
                          const ForwardArgs& args);

}  // namespace dflash::compute
