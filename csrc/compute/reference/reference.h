// Readable twins of the kernels: `f32-canonical` exactly as written in words, and a float64 oracle
// for tolerances.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/experts/expert_layer.h"
#include "compute/numerics.h"

namespace dflash::compute {

// The reference of any class, to the bit where these are the class's (Bits::kReference). It keeps
// float32 copies of the values that `formats` hold.
std::unique_ptr<ExpertLayer> make_reference_layer(const FfnSpec& spec, uint32_t num_local_experts,
                                                  ResidentFormats formats = WeightFormat::kF32,
                                                  NumericsClass numerics = kDefaultNumerics);

// The intermediate value of a gate (g; unused without one) and an up in float64.
double gate_float64(const FfnSpec& spec, double g, double u);

// The same function in float64 from inputs to the routing-weighted sum [num_rows, out_size]; no
// rounding on the way.
std::vector<double> forward_float64(const FfnSpec& spec, std::span<const ExpertWeights> experts,
                                    const ForwardArgs& args);

}  // namespace dflash::compute
