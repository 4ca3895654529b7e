// Computes VDPBF16PS with fmaf, whose results differ from it only near the smallest normal number.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/bf16_dot.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/dtype.h"

namespace dflash::compute {
namespace {

constexpr size_t kChain = 256;                                  // inputs per chain
constexpr float kSmallest = std::numeric_limits<float>::min();  // 2^-126

float flushed(float value) {
  return std::fabs(value) < kSmallest ? std::copysign(0.0f, value) : value;
}

// Computes a * b + c as the instruction rounds it: to 24 bits whatever the exponent, after which
// what lies below 2^-126 is flushed. fmaf rounds such results to fewer bits, so that more of them
// reach 2^-126. Those are told apart here by what the rounding added.
float fused_step(float a, float b, float c) {
  a = flushed(a);
  b = flushed(b);
  c = flushed(c);
  const float sum = std::fmaf(a, b, c);
  if (std::fabs(sum) != kSmallest) return flushed(sum);
  // This is exact, because c - sum fits float64 wherever a * b + c is this small, and a rounded fma
  // has the sign and the size of the sum.
  const double beyond = std::fma(static_cast<double>(a), static_cast<double>(b),
                                 static_cast<double>(c) - static_cast<double>(sum));
  const double missing = sum > 0 ? -beyond : beyond;  // 2^-126 minus the exact magnitude
  // Half a step of the 24-bit numbers just below 2^-126; a tie goes up, to even.
  const double half_step = std::ldexp(1.0, -151);
  return missing > half_step ? std::copysign(0.0f, sum) : sum;
}

}  // namespace

float bf16_pair_dot(const float* a, const float* b, float sum) {
  return fused_step(a[0], b[0], fused_step(a[1], b[1], sum));
}

float bf16_dot(const float* weights, const float* inputs, size_t num_inputs) {
  float total = 0.0f;
  for (size_t begin = 0; begin < num_inputs; begin += kChain) {
    const size_t end = std::min(begin + kChain, num_inputs);
    float chain = 0.0f;
    for (size_t k = begin; k < end; k += 2) {
      const bool is_pair = k + 1 < end;
      const float weight_pair[2] = {weights[k], is_pair ? weights[k + 1] : 0.0f};
      const float input_pair[2] = {inputs[k], is_pair ? inputs[k + 1] : 0.0f};
      chain = bf16_pair_dot(weight_pair, input_pair, chain);
    }
    total = begin == 0 ? chain : total + chain;
  }
  return total;
}

void round_to_bf16(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = bf16_to_f32(f32_to_bf16(values[i]));
}

}  // namespace dflash::compute
