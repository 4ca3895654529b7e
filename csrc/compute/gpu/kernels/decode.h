// Groups of 32 weights out of a record (record_layout.h) as float32, by the formulas of compute/dequantize.h: each product and each
// difference one operation, in the same order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/convert_floats.h"
#include "compute/gpu/record_layout.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kGroup = 32;

// One lane's record: unit u lies u * 512 bytes on.
struct Record {
  const unsigned char* first;
  GPU_FN Unit unit(uint32_t index) const { return load_device_16<Unit>(first + uint64_t{index} * (kUnitBytes * kPanelWidth)); }
  GPU_FN uint32_t word(uint32_t unit_index, uint32_t index) const {
    return load_device_word(first + uint64_t{unit_index} * (kUnitBytes * kPanelWidth) + 4 * index);
  }
  GPU_FN uint32_t half(uint32_t unit_index, uint32_t index) const { return word(unit_index, index / 2) >> (index % 2 * 16) & 0xffffu; }
  GPU_FN uint32_t byte(uint32_t unit_index, uint32_t index) const { return word(unit_index, index / 4) >> (index % 4 * 8) & 0xffu; }
};

GPU_FN uint32_t byte_of(const Unit& unit, uint32_t index) { return unit.words[index / 4] >> (index % 4 * 8) & 0xffu; }
GPU_FN int32_t signed_byte(uint32_t byte) { return static_cast<int32_t>(byte ^ 0x80u) - 128; }

GPU_FN float widen_e8m0(uint32_t exponent) {  // 2^(exponent - 127)
  if (exponent == 255) return float_of(0x7fc00000u);
  return float_of(exponent == 0 ? 0x400000u : exponent << 23);
}
GPU_FN float widen_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return float_of(0x7fc00000u);
  return float_of(sign | bits_of(mul(float_of(magnitude << 20), 0x1p120f)));  // exact, and normalises subnormals
}
GPU_FN float widen_e2m1(uint32_t code) {
  const float size = mul(static_cast<float>(0xc8643210u >> ((code & 7u) * 4) & 15u), 0.5f);
  return float_of(bits_of(size) | (code & 8u) << 28);
}
GPU_FN float iq4_level(uint32_t code) {  // kIq4Levels, a byte each
  const uint64_t levels = (code & 8u) == 0 ? 0xf6eaddcfbfad9881ull : 0x7159453526190d01ull;
  return static_cast<float>(signed_byte(static_cast<uint32_t>(levels >> ((code & 7u) * 8)) & 0xffu));
}

// 32 nibbles, byte i holding code i and 16 + i; value(code) * scale.
template <class Value>
GPU_FN void decode_nibbles(const Unit& unit, float scale, float* weights, Value value) {
  GPU_UNROLL
  for (uint32_t i = 0; i < 16; ++i) {
    const uint32_t pair = byte_of(unit, i);
    weights[i] = mul(value(pair & 15u), scale);
    weights[16 + i] = mul(value(pair >> 4), scale);
  }
}

struct MinusEight {
  GPU_FN float operator()(uint32_t code) const { return static_cast<float>(static_cast<int32_t>(code) - 8); }
};
struct E2m1 {
  GPU_FN float operator()(uint32_t code) const { return widen_e2m1(code); }
};
struct Iq4Level {
  GPU_FN float operator()(uint32_t code) const { return iq4_level(code); }
};

template <WeightFormat kFormat>
GPU_FN void decode_halves(const Record& record, uint32_t group, float* weights) {
  GPU_UNROLL
  for (uint32_t u = 0; u < 4; ++u) {
    const Unit unit = record.unit(group * 4 + u);
    GPU_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t low = unit.words[i] & 0xffffu, high = unit.words[i] >> 16;
      weights[u * 8 + 2 * i] = kFormat == WeightFormat::kF16 ? widen_f16(low) : widen_bf16(low);
      weights[u * 8 + 2 * i + 1] = kFormat == WeightFormat::kF16 ? widen_f16(high) : widen_bf16(high);
    }
  }
}

template <WeightFormat kFormat>
GPU_FN void decode_bytes(const Record& record, uint32_t group, float scale, float* weights) {
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    const Unit unit = record.unit(group * 2 + u);
    GPU_UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t code = byte_of(unit, i);
      const float value = kFormat == WeightFormat::kFp8E4m3B128 ? widen_e4m3(code) : static_cast<float>(signed_byte(code));
      weights[u * 16 + i] = mul(value, scale);
    }
  }
}

// Of q4_k and q5_k: d * scale and dmin * minimum of a group. Unit 0: d, dmin, 12 bytes of six-bit scales and minima.
GPU_FN void k_affine(const Record& record, uint32_t group, float& factor, float& offset) {
  const uint32_t scales = record.word(0, 0);
  uint32_t scale, minimum;
  if (group < 4) {
    scale = record.byte(0, 4 + group) & 63u;
    minimum = record.byte(0, 8 + group) & 63u;
  } else {
    const uint32_t low = record.byte(0, 8 + group);
    scale = (low & 15u) | (record.byte(0, group) >> 6) << 4;
    minimum = low >> 4 | (record.byte(0, 4 + group) >> 6) << 4;
  }
  factor = mul(widen_f16(scales & 0xffffu), static_cast<float>(scale));
  offset = mul(widen_f16(scales >> 16), static_cast<float>(minimum));
}

// q4_k and q5_k: (d * scale) * code - (dmin * minimum).
template <bool kHasFifthBit>
GPU_FN void decode_k_affine(const Record& record, uint32_t group, float* weights) {
  float factor, offset;
  k_affine(record, group, factor, offset);
  const uint32_t nibbles = (kHasFifthBit ? 3 : 1) + group / 2 * 2, shift = group % 2 * 4;
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    const Unit unit = record.unit(nibbles + u);
    Unit fifth{};
    if constexpr (kHasFifthBit) fifth = record.unit(1 + u);
    GPU_UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      uint32_t code = byte_of(unit, i) >> shift & 15u;
      if constexpr (kHasFifthBit) code |= (byte_of(fifth, i) >> group & 1u) << 4;
      weights[u * 16 + i] = sub(mul(factor, static_cast<float>(code)), offset);
    }
  }
}

// q6_k: (d * scale) * (code - 32) + 0. Group g is bit pair j = g % 4 of half g / 4.
GPU_FN void decode_q6_k(const Record& record, uint32_t group, float* weights) {
  const uint32_t half = group / 4, j = group % 4;
  const float d = widen_f16(record.half(13, 0));
  GPU_UNROLL
  for (uint32_t u = 0; u < 2; ++u) {
    const Unit low = record.unit(half * 4 + j % 2 * 2 + u), high = record.unit(8 + half * 2 + u);
    const float factor = mul(d, static_cast<float>(signed_byte(record.byte(12, group * 2 + u))));
    GPU_UNROLL
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t code = (byte_of(low, i) >> (j / 2 * 4) & 15u) | (byte_of(high, i) >> (2 * j) & 3u) << 4;
      weights[u * 16 + i] = add(mul(factor, static_cast<float>(static_cast<int32_t>(code) - 32)), 0.0f);  // no negative zeros
    }
  }
}

GPU_FN float iq4_xs_factor(const Record& record, uint32_t group) {
  const uint32_t low = record.byte(8, 4 + group / 2) >> (group % 2 * 4) & 15u;
  const uint32_t scale = low | (record.half(8, 1) >> (2 * group) & 3u) << 4;
  return mul(widen_f16(record.half(8, 0)), static_cast<float>(static_cast<int32_t>(scale) - 32));
}

// Weights of inputs [32 * group, 32 * group + 32) of the record.
template <WeightFormat kFormat>
GPU_FN void decode_group(const Record& record, uint32_t group, float* weights) {
  if constexpr (kFormat == WeightFormat::kF32) {
    GPU_UNROLL
    for (uint32_t u = 0; u < 8; ++u) {
      const Unit unit = record.unit(group * 8 + u);
      GPU_UNROLL
      for (uint32_t i = 0; i < 4; ++i) weights[u * 4 + i] = float_of(unit.words[i]);
    }
  } else if constexpr (kFormat == WeightFormat::kF16 || kFormat == WeightFormat::kBF16) {
    decode_halves<kFormat>(record, group, weights);
  } else if constexpr (kFormat == WeightFormat::kInt8G32) {
    decode_bytes<kFormat>(record, group, float_of(record.word(16 + group / 4, group % 4)), weights);
  } else if constexpr (kFormat == WeightFormat::kFp8E4m3B128) {
    decode_bytes<kFormat>(record, group, float_of(record.word(16, group / 4)), weights);
  } else if constexpr (kFormat == WeightFormat::kQ8_0) {
    decode_bytes<kFormat>(record, group, widen_f16(record.half(16, group)), weights);
  } else if constexpr (kFormat == WeightFormat::kInt4G32) {
    decode_nibbles(record.unit(group), float_of(record.word(8 + group / 4, group % 4)), weights, MinusEight{});
  } else if constexpr (kFormat == WeightFormat::kQ4_0) {
    decode_nibbles(record.unit(group), widen_f16(record.half(8, group)), weights, MinusEight{});
  } else if constexpr (kFormat == WeightFormat::kIq4Nl) {
    decode_nibbles(record.unit(group), widen_f16(record.half(8, group)), weights, Iq4Level{});
  } else if constexpr (kFormat == WeightFormat::kGgufMxfp4 || kFormat == WeightFormat::kMxfp4) {
    decode_nibbles(record.unit(group), widen_e8m0(record.byte(8, group)), weights, E2m1{});
  } else if constexpr (kFormat == WeightFormat::kIq4Xs) {
    decode_nibbles(record.unit(group), iq4_xs_factor(record, group), weights, Iq4Level{});
  } else if constexpr (kFormat == WeightFormat::kQ4K || kFormat == WeightFormat::kQ5K) {
    decode_k_affine<kFormat == WeightFormat::kQ5K>(record, group, weights);
  } else {
    static_assert(kFormat == WeightFormat::kQ6K);
    decode_q6_k(record, group, weights);
  }
}

}  // namespace dflash::compute::gpu
