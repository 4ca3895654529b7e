// The peak loop for AArch64's matrix products of bf16's, the most that its BF16 extension does in
// one instruction.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include <arm_neon.h>

#include "measure/peaks.h"

namespace dflash::measure {

// There are chains enough to hide the latency of four units (4 cycles on Neoverse V1).
uint64_t bf16_multiply_add_neon_bf16(uint64_t rounds, float* sink) {
  constexpr int kChains = 16, kSteps = 64;  // products per chain and round
  // The factors are 0.5 and 0.25, with which sums stay finite for any number of rounds.
  bfloat16x8_t factors = vreinterpretq_bf16_u32(vdupq_n_u32(0x3f003e80u));
  float32x4_t chains[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) {
    chains[i] = vdupq_n_f32(static_cast<float>(i));
    asm volatile("" : "+w"(chains[i]));  // hides from the compiler that chains are alike
  }
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) chains[i] = vbfmmlaq_f32(chains[i], factors, factors);
    }
  }
  float32x4_t sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = vaddq_f32(sum, chains[i]);
  *sink = vgetq_lane_f32(sum, 0);
  return rounds * kSteps * kChains * 16 * 2;
}

}  // namespace dflash::measure
#endif
