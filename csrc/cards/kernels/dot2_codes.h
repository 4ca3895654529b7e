// Groups of 32 weights of a record in the form that class f16-dot2 multiplies: pairs of f16 in
// ascending order, the factor of the group (of each half where scales belong to 16 inputs), and its
// offset where the format has one. Integers and fp8 are exact in f16. Floats are scaled by a power
// of two per group, which brings the largest of them into [2^14, 2^15): so nothing overflows, and
// what f16 cannot hold is below 2^-28 of the largest.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/half_pairs.h"
#include "cards/kernels/int8_codes.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kGroupPairs = kGroup / 2;

struct HalfGroup {
  uint32_t words[kGroupPairs];
  float scales[2];
  float offsets[2];  // as Int8Group's
};

// The power of two, and its inverse, for a group whose largest magnitude is given (as the bits of a
// float without sign). With NaN or infinity among them the scale is NaN.
struct HalfScale {
  float scale, inverse;
};
GPU_FN HalfScale half_scale(uint32_t magnitude) {
  // Below 2^-112 the inverse would not fit float32.
  const uint32_t found = magnitude >> 23, exponent = found < 15 ? 15 : found;
  if (exponent == 255) return {float_of(0x7fc00000u), 0.0f};
  return {float_of((exponent - 14) << 23), float_of((268 - exponent) << 23)};
}

GPU_FN uint32_t magnitude_of(float value) { return bits_of(value) & 0x7fffffffu; }

template <WeightFormat kFormat>
GPU_FN HalfGroup scaled_group(const StoredGroup<kFormat>& stored, uint32_t index) {
  float weights[kGroup];
  if constexpr (kFormat == WeightFormat::kF16) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kGroup; i += 2) {
      const uint32_t pair = stored.units[i / 8].words[i % 8 / 2];
      weights[i] = low_half(pair);
      weights[i + 1] = high_half(pair);
    }
  } else {
    decode_stored<kFormat>(stored, index, weights);
  }
  uint32_t largest = 0;  // as integers magnitudes keep their order, with infinity and NaN above all
  GPU_UNROLL
  for (uint32_t i = 0; i < kGroup; ++i)
    largest = magnitude_of(weights[i]) > largest ? magnitude_of(weights[i]) : largest;
  const HalfScale by = half_scale(largest);
  HalfGroup group{};
  GPU_UNROLL
  for (uint32_t i = 0; i < kGroupPairs; ++i)
    group.words[i] =
        half_pair(mul(weights[2 * i], by.inverse), mul(weights[2 * i + 1], by.inverse));
  group.scales[0] = by.scale;
  return group;
}

// For formats whose codes f16 holds exactly.
GPU_FN HalfGroup e4m3_group(const StoredGroup<WeightFormat::kFp8E4m3B128>& stored) {
  HalfGroup group{};
  GPU_UNROLL
  for (uint32_t i = 0; i < kGroupPairs; ++i) {
    const uint32_t codes = stored.units[i / 8].words[i % 8 / 2] >> (i % 2 * 16);
    group.words[i] = half_pair(widen_e4m3(codes & 0xffu), widen_e4m3(codes >> 8 & 0xffu));
  }
  group.scales[0] = float_of(stored.scales[0]);
  return group;
}

// Makes of a stored group, number `index` of its record, what is multiplied.
template <WeightFormat kFormat>
GPU_FN HalfGroup half_group(const StoredGroup<kFormat>& stored, uint32_t index) {
  if constexpr (is_float(kFormat)) {
    return scaled_group<kFormat>(stored, index);
  } else if constexpr (kFormat == WeightFormat::kFp8E4m3B128) {
    return e4m3_group(stored);
  } else {
    const Int8Group integers = codes_of<kFormat>(stored, index);
    HalfGroup group{};
    GPU_UNROLL
    for (uint32_t w = 0; w < kGroupWords; ++w) {
      group.words[2 * w] = low_bytes_as_pair(integers.words[w]);
      group.words[2 * w + 1] = high_bytes_as_pair(integers.words[w]);
    }
    GPU_UNROLL
    for (uint32_t p = 0; p < group_parts(kFormat); ++p) {
      group.scales[p] = integers.scales[p];
      if constexpr (has_offset(kFormat)) group.offsets[p] = integers.offsets[p];
    }
    return group;
  }
}

}  // namespace dflash::compute::gpu
