// Computes BFDOT's rounding to odd by way of float64 sums that carry what they lack.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/bf16_dot.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace dflash::compute {
namespace {

constexpr size_t kChain = 256;                                  // inputs per chain
constexpr float kSmallest = std::numeric_limits<float>::min();  // 2^-126

float flushed(float value) {
  return std::fabs(value) < kSmallest ? std::copysign(0.0f, value) : value;
}

// Rounds `sum` + `rest` to a float32 to odd: the value is cut off, and the last bit is set where
// anything was cut. `sum` is the float64 nearest to the value and `rest` what it lacks.
float round_to_odd(double sum, double rest) {
  if (std::isnan(sum)) return std::numeric_limits<float>::quiet_NaN();
  if (std::isinf(sum)) return static_cast<float>(sum);
  uint64_t bits = std::bit_cast<uint64_t>(sum);
  // The float64 was rounded away from zero, so it goes one step back.
  if (rest != 0.0 && std::signbit(rest) != std::signbit(sum)) --bits;
  // The bits of a float64 for which a float32 has no place.
  constexpr uint64_t kBehind = (uint64_t{1} << 29) - 1;
  const bool is_inexact = rest != 0.0 || (bits & kBehind) != 0;
  const double cut = std::bit_cast<double>(bits & ~kBehind);
  if (std::fabs(cut) >= 0x1p128)
    return static_cast<float>(std::copysign(std::numeric_limits<double>::infinity(), sum));
  if (std::fabs(cut) < static_cast<double>(kSmallest))
    return static_cast<float>(std::copysign(0.0, sum));
  return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(cut)) |
                              (is_inexact ? 1u : 0u));
}

// The product of two bf16 has 16 significant bits, so that it is exact before it is rounded.
float product(float a, float b) {
  return round_to_odd(static_cast<double>(flushed(a)) * static_cast<double>(flushed(b)), 0.0);
}

float add(float a, float b) {
  const double x = static_cast<double>(flushed(a)), y = static_cast<double>(flushed(b));
  const double sum = x + y;
  const double part = sum - x;
  // What the sum lacks is found by Knuth's two-sum.
  return round_to_odd(sum, std::isfinite(sum) ? (x - (sum - part)) + (y - part) : 0.0);
}

}  // namespace

float bf16_bfdot_step(const float* a, const float* b, float sum) {
  return add(sum, add(product(a[0], b[0]), product(a[1], b[1])));
}

float bf16_bfdot(const float* weights, const float* inputs, size_t num_inputs) {
  float total = 0.0f;
  for (size_t begin = 0; begin < num_inputs; begin += kChain) {
    const size_t end = std::min(begin + kChain, num_inputs);
    float chain = 0.0f;
    for (size_t k = begin; k < begin + (end - begin + 3) / 4 * 4; k += 2) {
      const auto pair_of = [&](const float* values, float* pair) {
        for (size_t i = 0; i < 2; ++i) pair[i] = k + i < end ? values[k + i] : 0.0f;
      };
      float weight_pair[2], input_pair[2];
      pair_of(weights, weight_pair);
      pair_of(inputs, input_pair);
      chain = bf16_bfdot_step(weight_pair, input_pair, chain);
    }
    total = begin == 0 ? chain : total + chain;
  }
  return total;
}

}  // namespace dflash::compute
