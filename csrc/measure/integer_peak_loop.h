// The loop behind integer_multiply_add_per_s, over a step that adds the products of a vector of
// bytes to int32 lanes. Included by peaks_<set>.cc only; there is no std:: code here, because it
// could be linked into portable callers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The constraint by which inline assembly names a vector register.
#if defined(__aarch64__)
#define DFLASH_VECTOR "w"
#else
#define DFLASH_VECTOR "v"
#endif

namespace dflash::measure {

// D provides I (a vector), zero(), bytes(int8_t) with the value in every byte, add_products(I sum,
// I a, I b), kBytes (products per step) and kChains (enough to hide the latency of two units).
template <class D>
[[gnu::always_inline]] inline uint64_t integer_multiply_add_loop(uint64_t rounds, float* sink) {
  constexpr int kSteps = 64;  // steps per chain and round
  typename D::I chains[D::kChains];
  typename D::I a = D::bytes(3), b = D::bytes(2);
  // The compiler must not know these, nor the chains: equal chains would be computed once.
  asm volatile("" : "+" DFLASH_VECTOR(a), "+" DFLASH_VECTOR(b));
#pragma GCC unroll 16
  for (int i = 0; i < D::kChains; ++i) {
    chains[i] = D::zero();
    asm volatile("" : "+" DFLASH_VECTOR(chains[i]));
  }
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < D::kChains; ++i) chains[i] = D::add_products(chains[i], a, b);
    }
  }
#pragma GCC unroll 16
  // These count as uses, so that no chain is dropped.
  for (int i = 0; i < D::kChains; ++i) asm volatile("" : : DFLASH_VECTOR(chains[i]));
  int32_t lane;
  __builtin_memcpy(&lane, &chains[0], sizeof(lane));
  *sink = static_cast<float>(lane);
  return rounds * kSteps * D::kChains * D::kBytes * 2;
}

}  // namespace dflash::measure

#undef DFLASH_VECTOR
