// The vector type of activation.h and canonical_products.h with one lane. It is portable, and the
// reference computes with it.
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
  // As many as fit the 16 registers of the portable baseline beside the operands.
  static constexpr int kAccumulators = 8;
  static constexpr int kMaxTileRows = 4;

  static F set1(float value) { return value; }
  static F load(const float* from) { return *from; }
  static void store(float* to, F value) { *to = value; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F sqrt(F a) { return std::sqrt(a); }
  static F fma(F a, F b, F c) { return std::fmaf(a, b, c); }
  static F min(F a, F b) { return a < b ? a : b; }
  static F max(F a, F b) { return a > b ? a : b; }
  static F select_greater(F a, F b, F x, F y) { return a > b ? x : y; }
  static I bits(F value) { return std::bit_cast<I>(value); }
  static F from_bits(I bits) { return std::bit_cast<F>(bits); }
  static I set1i(int32_t value) { return value; }
  static I subi(I a, I b) {
    return static_cast<I>(static_cast<uint32_t>(a) - static_cast<uint32_t>(b));
  }
  static I halve(I value) { return value >> 1; }
  static F power_of_two(I n) { return std::bit_cast<F>((static_cast<uint32_t>(n) + 127u) << 23); }
  static F canonical_nan(F value) { return value != value ? std::bit_cast<F>(0x7fc00000u) : value; }

  // Loads two vectors of weights from one packed step (pack.h gives the order of 16-bit elements).
  static void load_weights(const float* from, F* pair) { pair[0] = from[0], pair[1] = from[1]; }
  struct F16 {
    uint16_t bits;
  };
  struct BF16 {
    uint16_t bits;
  };
  static void load_weights(const F16* from, F* pair) {
    pair[0] = f16_to_f32(from[0].bits), pair[1] = f16_to_f32(from[1].bits);
  }
  static void load_weights(const BF16* from, F* pair) {
    pair[0] = bf16_to_f32(from[0].bits), pair[1] = bf16_to_f32(from[1].bits);
  }

  // Loads adjacent elements that are stored one after another; no address need be aligned.
  static F load_adjacent(const float* from) { return *from; }
  static F load_adjacent(const F16* from) { return f16_to_f32(from->bits); }
  static F load_adjacent(const BF16* from) { return bf16_to_f32(from->bits); }

  // What follows reads quantised weights (quantized_formats.h), whose addresses are not aligned.
  using Table = const float*;
  static Table table(const float* values) { return values; }
  static F look_up(Table table, I index) { return table[index & 15]; }
  // The same by the low three bits, in a table whose halves are equal.
  static F look_up_eight(Table table, I index) { return table[index & 7]; }
  static I load_words(const uint8_t* from) {
    I value;
    __builtin_memcpy(&value, from, sizeof(value));
    return value;
  }
  static I shift_right(I value, uint32_t count) {
    return static_cast<I>(static_cast<uint32_t>(value) >> count);
  }
  static I shift_left(I value, uint32_t count) {
    return static_cast<I>(static_cast<uint32_t>(value) << count);
  }
  static I shift_right_signed(I value, int32_t count) { return value >> count; }
  static I merge(I mask, I a, I b) { return (mask & a) | (~mask & b); }
  // A float in [1, 2) with those bits of `mantissa` that the mask has.
  static F one_and(I mantissa, I mask) { return std::bit_cast<F>((mantissa & mask) | 0x3f800000); }
  static F to_float(I value) { return static_cast<F>(value); }
  static F load_f16(const uint8_t* from) {
    return f16_to_f32(static_cast<uint16_t>(from[0] | from[1] << 8));
  }
  static I widen_u8(const uint8_t* from) { return *from; }
  static I widen_u16(const uint8_t* from) { return from[0] | from[1] << 8; }
  static F load_u8(const uint8_t* from) { return static_cast<F>(*from); }
  static I addi(I a, I b) {
    return static_cast<I>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
  static I gather(const uint32_t* table, I index) { return static_cast<I>(table[index]); }
  static F load_i8(const uint8_t* from) { return static_cast<F>(static_cast<int8_t>(*from)); }
  static F load_exponents(const uint8_t* from) {  // 2^(byte - 127) for bytes below 255
    return std::bit_cast<F>(*from == 0 ? 0x00400000u : static_cast<uint32_t>(*from) << 23);
  }
  static void load_e4m3(const uint8_t* from, F* pair) {  // moved to f16's places, as vectors do it
    for (int i = 0; i < 2; ++i) {
      pair[i] =
          f16_to_f32(static_cast<uint16_t>((from[i] & 0x80) << 8 | (from[i] & 0x7f) << 7)) * 256.0f;
    }
  }
};

}  // namespace dflash::compute
