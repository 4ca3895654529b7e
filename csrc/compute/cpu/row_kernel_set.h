// The seam between the row operators and instruction sets: one table of kernels per set. A kernel
// takes one row of float32 values; row_operators.cc, above it, is portable and knows rows, dtypes
// and threads. The formulas are in operators/, and every set gives their bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "compute/cpu/instruction_sets.h"

namespace dflash::compute {

struct FfnSpec;      // experts/ffn_spec.h
struct NormRow;      // operators/norm.h
struct RotaryPairs;  // operators/rotary.h
struct RouterRow;    // operators/router.h
struct ScaledRow;    // operators/gating.h

// They may run on any thread that has the canonical floating-point mode.
struct RowKernels {
  void (*rms_norm)(const NormRow&);
  void (*layer_norm)(const NormRow&);
  void (*rotate)(const RotaryPairs&);
  void (*route)(const RouterRow&);
  void (*gate)(const FfnSpec&, const float* g, const float* u, float* out, uint32_t width);
  void (*add_scaled)(const ScaledRow&);
  uint32_t (*argmax)(const float* values, uint32_t width);
};

extern const RowKernels kScalarRows;
#if defined(__x86_64__)
extern const RowKernels kAvx2Rows, kAvx512Rows;
#elif defined(__aarch64__)
extern const RowKernels kNeonRows;
#endif

// The kernels of a supported set. The reference has none; its bits are those of every set, and it
// gets the portable ones.
const RowKernels& row_kernels(Isa isa);

}  // namespace dflash::compute
