// The readable twins of the kernels: every class as it is written in words, a float64 oracle for
// tolerances (oracle.cc), and bounds for the classes that have no bits (class_bounds.cc).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

// Makes the reference of any class. Its bits are the class's where the class fixes them
// (Bits::kReference). It keeps float32 copies of the values that `formats` hold.
std::unique_ptr<ExpertLayer> make_reference_layer(const FfnSpec& spec, uint32_t num_local_experts,
                                                  ResidentFormats formats = WeightFormat::kF32,
                                                  NumericsClass numerics = kDefaultNumerics);

// The intermediate value of a gate and an up in float64; `g` is not used where there is no gate.
double gate_float64(const FfnSpec& spec, double g, double u);

// Computes the same function in float64, from the inputs to the routing-weighted sums
// [num_rows, out_size], without rounding anything on the way to a narrower type.
std::vector<double> forward_float64(const FfnSpec& spec, std::span<const ExpertWeights> experts,
                                    const ForwardArgs& args);

// The lowest and highest value that each output of a bounded class (NumericsFacts::is_bounded) may
// have: one whose bits depend on the card that computes them. For a batch this gives, in float64,
// an interval that holds each output on every card. It follows from what the class fixes (operands
// and intermediate rows are rounded to bf16 or f16) and from a bound on what the class leaves to
// the matrix instruction, which is the order and precision of its sums (docs/decisions/0015, 0019).
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
