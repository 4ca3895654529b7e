// The loop behind integer_multiply_add_per_s, over a step that adds the products of a vector of
// bytes to int32 lanes. Included by peaks_<set>.cc files only; no std:: code here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The constraint of a vector register.
#if defined(__aarch64__)
#define DFLASH_VECTOR "w"
#else
#define DFLASH_VECTOR "v"
#endif

namespace dflash::measure {

// D: I, zero(), bytes(int8_t) in every byte, add_products(I sum, I a, I b), kBytes (products per
// step), kChains (enough to hide the latency of two units).
template <class D>
[[gnu::always_inline]] inline uint64_t integer_multiply_add_loop(uint64_t rounds, float* sink) {
  constexpr int kSteps = 64;  // per chain and round
  typename D::I chains[D::kChains];
  typename D::I a = D::bytes(3), b = D::bytes(2);
  // unknown to the compiler, as are the chains: equal ones would be computed once
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
  // all count as used
  for (int i = 0; i < D::kChains; ++i) asm volatile("" : : DFLASH_VECTOR(chains[i]));
  int32_t lane;
  __builtin_memcpy(&lane, &chains[0], sizeof(lane));
  *sink = static_cast<float>(lane);
  return rounds * kSteps * D::kChains * D::kBytes * 2;
}

}  // namespace dflash::measure

#undef DFLASH_VECTOR
