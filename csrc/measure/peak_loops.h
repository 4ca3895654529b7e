// The loops of peaks.h, written once over a vector type V. Included only by peaks.cc and
// peaks_<set>.cc, which provide V; there is no std:: code here, because it could be linked into
// portable callers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "measure/peaks.h"

namespace dflash::measure {

// Counts fmas from registers. There are as many chains as hide the latency of two fma units, which
// is 4 cycles on current cores, with room to spare.
template <class V>
uint64_t multiply_add_loop(uint64_t rounds, float* sink) {
  constexpr int kChains = V::kAccumulators < 16 ? V::kAccumulators : 16;
  constexpr int kSteps = 64;  // fmas per chain and round
  typename V::F chains[kChains];
  const typename V::F factor = V::set1(0.9999f), term = V::set1(0.0001f);
#pragma GCC unroll 16
  for (int i = 0; i < kChains; ++i) chains[i] = V::set1(1.0f + static_cast<float>(i));
  for (uint64_t round = 0; round < rounds; ++round) {
    for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) chains[i] = V::fma(chains[i], factor, term);
    }
  }
  float lanes[V::kLanes];
  typename V::F sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = V::add(sum, chains[i]);
  V::store(lanes, sum);
  *sink = lanes[0];
  return rounds * kSteps * kChains * V::kLanes * 2;
}

// Reads memory and adds it up, with enough chains that the additions do not hold back the reading.
template <class V>
void read_loop(const std::byte* data, size_t num_bytes, float* sink) {
  constexpr int kChains = 8;
  typename V::F chains[kChains];
#pragma GCC unroll 8
  for (int i = 0; i < kChains; ++i) chains[i] = V::set1(0.0f);
  constexpr size_t kStep = sizeof(float) * V::kLanes * kChains;
  for (size_t at = 0; at < num_bytes; at += kStep) {
    const float* from = reinterpret_cast<const float*>(data + at);
    // It is prefetched as the kernels do, because the hardware's own prefetch stops at page ends.
    __builtin_prefetch(data + at + 4096);
    if constexpr (kStep > 64) __builtin_prefetch(data + at + 4096 + 64);
    if constexpr (kStep > 128) {
      for (size_t line = 128; line < kStep; line += 64) __builtin_prefetch(data + at + 4096 + line);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kChains; ++i) chains[i] = V::add(chains[i], V::load(from + i * V::kLanes));
  }
  float lanes[V::kLanes];
  typename V::F sum = chains[0];
  for (int i = 1; i < kChains; ++i) sum = V::add(sum, chains[i]);
  V::store(lanes, sum);
  *sink = lanes[0];
}

template <class V>
constexpr PeakLoops make_peak_loops() {
  return PeakLoops{.multiply_add = multiply_add_loop<V>, .read = read_loop<V>};
}

}  // namespace dflash::measure
