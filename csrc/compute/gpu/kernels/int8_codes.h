// Groups of 32 weights out of a record as class int8-groups wants them: signed bytes, four inputs to a word in ascending order, the factor of
// the group (of each half in q6_k) and its offset where the format has one. Bytes are computed four at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/decode.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kGroupWords = kGroup / 4;

// Scales per group: q6_k has one per 16 inputs.
DFLASH_GPU_BOTH constexpr uint32_t group_parts(WeightFormat format) { return format == WeightFormat::kQ6K ? 2 : 1; }
DFLASH_GPU_BOTH constexpr bool has_offset(WeightFormat format) { return format == WeightFormat::kQ4K || format == WeightFormat::kQ5K; }

struct Int8Group {
  uint32_t words[kGroupWords];
  float scales[2];
  float offset;  // 0 - dmin * minimum: a factor of the sum of the row's codes
};

// Bytes in 0..127, each less `bias` (at most 128).
GPU_FN uint32_t less_bias(uint32_t bytes, uint32_t bias) { return ((bytes | 0x80808080u) - bias * 0x01010101u) ^ 0x80808080u; }

struct LessEight {
  GPU_FN uint32_t operator()(uint32_t codes) const { return less_bias(codes, 8); }
};
// Sixteen signed bytes, looked up four codes at a time.
struct LevelTable {
  uint32_t levels[4];
  GPU_FN uint32_t operator()(uint32_t codes) const {
    const uint32_t selectors = codes & 0x07070707u, is_upper = (codes >> 3 & 0x01010101u) * 0xffu;
    const uint32_t lower = pick_bytes(levels[0], levels[1], selectors), upper = pick_bytes(levels[2], levels[3], selectors);
    return (lower & ~is_upper) | (upper & is_upper);
  }
};
GPU_FN LevelTable iq4_levels() { return {{0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}}; }
GPU_FN LevelTable doubled_e2m1() { return {{0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu}}; }

template <class Value>
GPU_FN void read_nibbles(const Unit& unit, const Value& value, Int8Group& group) {
  GPU_UNROLL
  for (uint32_t w = 0; w < 4; ++w) {
    group.words[w] = value(unit.words[w] & 0x0f0f0f0fu);
    group.words[4 + w] = value(unit.words[w] >> 4 & 0x0f0f0f0fu);
  }
}

GPU_FN void read_bytes(const Record& record, uint32_t index, Int8Group& group) {
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    const Unit unit = record.unit(index * 2 + u);
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) group.words[u * 4 + w] = unit.words[w];
  }
}

template <bool kHasFifthBit>
GPU_FN void read_k_affine(const Record& record, uint32_t index, Int8Group& group) {
  float offset;
  k_affine(record, index, group.scales[0], offset);
  group.offset = sub(0.0f, offset);
  const uint32_t nibbles = (kHasFifthBit ? 3 : 1) + index / 2 * 2, shift = index % 2 * 4;
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    const Unit unit = record.unit(nibbles + u);
    Unit fifth{};
    if constexpr (kHasFifthBit) fifth = record.unit(1 + u);
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) {
      group.words[u * 4 + w] = unit.words[w] >> shift & 0x0f0f0f0fu;
      if constexpr (kHasFifthBit) group.words[u * 4 + w] |= (fifth.words[w] >> index & 0x01010101u) << 4;
    }
  }
}

GPU_FN void read_q6_k(const Record& record, uint32_t index, Int8Group& group) {
  const uint32_t half = index / 4, j = index % 4;
  const float d = widen_f16(record.half(13, 0));
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    group.scales[u] = mul(d, static_cast<float>(signed_byte(record.byte(12, index * 2 + u))));
    const Unit low = record.unit(half * 4 + j % 2 * 2 + u), high = record.unit(8 + half * 2 + u);
    GPU_UNROLL
    for (uint32_t w = 0; w < 4; ++w) {
      const uint32_t codes = (low.words[w] >> (j / 2 * 4) & 0x0f0f0f0fu) | (high.words[w] >> (2 * j) & 0x03030303u) << 4;
      group.words[u * 4 + w] = less_bias(codes, 32);
    }
  }
}

// Weights of inputs [32 * index, 32 * index + 32) of the record.
template <WeightFormat kFormat>
GPU_FN void read_codes(const Record& record, uint32_t index, Int8Group& group) {
  if constexpr (kFormat == WeightFormat::kInt8G32) {
    group.scales[0] = float_of(record.word(16 + index / 4, index % 4));
    read_bytes(record, index, group);
  } else if constexpr (kFormat == WeightFormat::kQ8_0) {
    group.scales[0] = widen_f16(record.half(16, index));
    read_bytes(record, index, group);
  } else if constexpr (kFormat == WeightFormat::kInt4G32) {
    group.scales[0] = float_of(record.word(8 + index / 4, index % 4));
    read_nibbles(record.unit(index), LessEight{}, group);
  } else if constexpr (kFormat == WeightFormat::kQ4_0) {
    group.scales[0] = widen_f16(record.half(8, index));
    read_nibbles(record.unit(index), LessEight{}, group);
  } else if constexpr (kFormat == WeightFormat::kIq4Nl) {
    group.scales[0] = widen_f16(record.half(8, index));
    read_nibbles(record.unit(index), iq4_levels(), group);
  } else if constexpr (kFormat == WeightFormat::kIq4Xs) {
    group.scales[0] = iq4_xs_factor(record, index);
    read_nibbles(record.unit(index), iq4_levels(), group);
  } else if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kGgufMxfp4) {
    group.scales[0] = mul(widen_e8m0(record.byte(8, index)), 0.5f);  // the codes are doubled
    read_nibbles(record.unit(index), doubled_e2m1(), group);
  } else if constexpr (kFormat == WeightFormat::kQ6K) {
    read_q6_k(record, index, group);
  } else {
    static_assert(has_offset(kFormat));
    read_k_affine<kFormat == WeightFormat::kQ5K>(record, index, group);
  }
}

}  // namespace dflash::compute::gpu
