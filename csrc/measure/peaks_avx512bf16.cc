// The peak loop for AVX512-BF16's dot products.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12's own headers start from an undefined vector
#endif
#include <immintrin.h>

#include "measure/peaks.h"

namespace dflash::measure {

// There are chains enough to hide the latency of two units (6 cycles on Zen 5).
uint64_t bf16_multiply_add_avx512bf16(uint64_t rounds, float* sink) {
  constexpr int kChains = 16, kSteps = 64;  // dot products per chain and round
  // The factors are 0.5 and 0.25, with which sums stay finite for any number of rounds.
  constexpr int kBf16Pair = 0x3f003e80;
  const __m512bh factors = reinterpret_cast<__m512bh>(_mm512_set1_epi32(kBf16Pair));
  __m512 chains[kChains];
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) chains[i] = _mm512_set1_ps(static_cast<float>(i));
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) chains[i] = _mm512_dpbf16_ps(chains[i], factors, factors);
    }
  }
  float lanes[16];
  __m512 sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = _mm512_add_ps(sum, chains[i]);
  _mm512_storeu_ps(lanes, sum);
  *sink = lanes[0];
  return rounds * kSteps * kChains * 16 * 4;
}

}  // namespace dflash::measure
#endif
