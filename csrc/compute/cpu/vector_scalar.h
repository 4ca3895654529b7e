// The vector type of compute/activation.h and cpu/kernel_body.h with one lane: portable, and what the reference computes with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "base/dtype.h"

namespace dflash::compute {

struct ScalarVector {
  using F = float;
  using I = int32_t;
  static constexpr int kLanes = 1;
  static constexpr int kAccumulators = 8;  // what fits the 16 registers of the portable baseline beside operands
  static constexpr int kMaxTileRows = 4;

  static F set1(float value) { return value; }
  static F load(const float* from) { return *from; }
  static void store(float* to, F value) { *to = value; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fmaf(a, b, c); }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F select_greater(F a, F b, F x, F y) { return a > b ? x : y; }
  static I bits(F value) { return std::bit_cast<I>(value); }
  static I set1i(int32_t value) { return value; }
  static I subi(I a, I b) { return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b)); }
  static I halve(I value) { return value >> 1; }
  static F power_of_two(I n) { return std::bit_cast<F>((static_cast<uint32_t>(n) + 127u) << 23); }
  static F canonical_nan(F value) { return value != value ? std::bit_cast<F>(0x7fc00000u) : value; }

  // Two vectors of weights from one packed step (pack.h gives the order of 16-bit elements).
  static void load_weights(const float* from, F* pair) { pair[0] = from[0], pair[1] = from[1]; }
  struct F16 { uint16_t bits; };
  struct BF16 { uint16_t bits; };
  static void load_weights(const F16* from, F* pair) { pair[0] = f16_to_f32(from[0].bits), pair[1] = f16_to_f32(from[1].bits); }
  static void load_weights(const BF16* from, F* pair) { pair[0] = bf16_to_f32(from[0].bits), pair[1] = bf16_to_f32(from[1].bits); }
};

}  // namespace dflash::compute
