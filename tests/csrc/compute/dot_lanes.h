// Random operands for one lane of a pair-wise dot product of bf16's, drawn where its rounding is
// told: what twins of instructions are held to.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cstdint>
#include <random>

#include "base/dtype.h"

namespace dflash::compute::lanes {

struct Lane {
  uint16_t a[2], b[2];
  uint32_t sum;
};

// With both factors of a pair widened, the bits of twin(a, b, sum).
template <class Twin>
uint32_t bits_of(Twin twin, const Lane& lane) {
  const float a[2] = {bf16_to_f32(lane.a[0]), bf16_to_f32(lane.a[1])},
              b[2] = {bf16_to_f32(lane.b[0]), bf16_to_f32(lane.b[1])};
  return std::bit_cast<uint32_t>(twin(a, b, std::bit_cast<float>(lane.sum)));
}

inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// Payloads are not compared: the classes replace every NaN by one.
inline bool same_bits(uint32_t a, uint32_t b) { return a == b || (is_nan(a) && is_nan(b)); }

// Exponents of the factors' and the sum's magnitudes: [first, first + count).
struct Range {
  const char* name;
  uint32_t factor_first, factor_count, sum_first, sum_count;
};

inline Lane random_lane(std::mt19937_64& random, const Range& range) {
  const auto factor = [&] {
    const uint64_t draw = random();
    // a quarter are powers of two: sums meet exactly
    const uint32_t mantissa = draw >> 60 < 4 ? 0 : draw & 0x7f;
    return static_cast<uint16_t>((draw >> 8 & 1) << 15 |
                                 (range.factor_first + (draw >> 16) % range.factor_count) << 7 |
                                 mantissa);
  };
  Lane lane{
      {factor(), factor()},
      {factor(), factor()},
      0
  };
  const uint64_t draw = random();
  const uint32_t mantissa = draw >> 60 < 8 ? 0 : static_cast<uint32_t>(draw) & 0x7fffff;
  lane.sum = static_cast<uint32_t>(
      (draw >> 32 & 1) << 31 | (range.sum_first + (draw >> 33) % range.sum_count) << 23 | mantissa);
  return lane;
}

inline constexpr Range kRanges[] = {
    {"like values of a layer", 120, 12,  114, 20 },
    {"far apart",              100, 50,  80,  80 },
    {"products around 2^-126", 54,  20,  0,   4  },
    {"products of subnormals", 0,   130, 0,   10 },
    {"overflowing",            180, 20,  230, 26 },
    {"any bits",               0,   256, 0,   256}
};

}  // namespace dflash::compute::lanes
