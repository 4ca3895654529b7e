// The readable twins of the kernels: every class as it is written in words, and a float64 oracle
// for tolerances.
// SPDX-License-Identifier: Apache-2.0
#pragma once

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

}  // namespace dflash::compute
