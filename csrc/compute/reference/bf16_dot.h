// The arithmetic of numerics class bf16-dot in words: what VDPBF16PS computes, found by comparing
// bits (docs/decisions/0010), and the chain that the class makes of it. Values are bf16's, kept as
// float32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace dflash::compute {

// One lane of VDPBF16PS: sum + a[1] * b[1], then + a[0] * b[0]. These are two fused steps, each
// rounded to nearest even. Subnormal operands count as zeros, and a result that would be subnormal
// becomes a zero of its sign, whatever the control word says.
float bf16_pair_dot(const float* a, const float* b, float sum);

// One output. Each block of 256 inputs is a chain of bf16_pair_dot from +0 over ascending pairs,
// with a zero beside an odd last input. The sums of blocks are added in ascending order.
float bf16_dot(const float* weights, const float* inputs, size_t num_inputs);

// Rounds to the nearest bf16, ties to even. What exceeds its range becomes infinity.
void round_to_bf16(float* values, size_t count);

// The arithmetic of numerics class bf16-bfdot in words: what AArch64's BFDOT computes while
// FPCR.EBF is 0 (docs/decisions/0014), and the chain that the class makes of it. Values are bf16's,
// kept as float32.

// One lane of BFDOT: sum + (a[0] * b[0] + a[1] * b[1]). Both products and both sums are rounded to
// odd. Subnormal operands count as zeros, a result below 2^-126 becomes a zero of its sign, and one
// of 2^128 and above becomes infinity, whatever the control register says.
float bf16_bfdot_step(const float* a, const float* b, float sum);

// One output. Each block of 256 inputs is a chain of bf16_bfdot_step from +0 over ascending pairs,
// filled up with zeros to a multiple of four inputs (two pairs, which BFMMLA takes at once). The
// sums of blocks are added in ascending order.
float bf16_bfdot(const float* weights, const float* inputs, size_t num_inputs);

}  // namespace dflash::compute
