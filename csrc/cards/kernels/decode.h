// Decodes groups of 32 weights (stored_group.h) to float32, eight at a time, by the formulas of
// compute/formats/dequantize.h: each product and each difference is one operation, in the same
// order, so that the bits are the same. Codes become floats by exact conversions and by differences
// of small integers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/convert_floats.h"
#include "cards/kernels/stored_group.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kOctet = 8;  // weights that are decoded at a time
inline constexpr uint32_t kGroupOctets = kGroup / kOctet;

GPU_FN float widen_e8m0(uint32_t exponent) {  // 2^(exponent - 127)
  if (exponent == 255) return float_of(0x7fc00000u);
  return float_of(exponent == 0 ? 0x400000u : exponent << 23);
}
GPU_FN float widen_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return float_of(0x7fc00000u);
  // The product is exact, and normalises subnormals.
  return float_of(sign | bits_of(mul(float_of(magnitude << 20), 0x1p120f)));
}
GPU_FN int32_t signed_byte(uint32_t byte) { return static_cast<int32_t>(byte ^ 0x80u) - 128; }

// A table of sixteen signed bytes, in which four codes are looked up at a time.
struct LevelTable {
  uint32_t levels[4];
  GPU_FN uint32_t operator()(uint32_t codes) const {
    const uint32_t selectors = codes & 0x07070707u, is_upper = (codes >> 3 & 0x01010101u) * 0xffu;
    const uint32_t lower = pick_bytes(levels[0], levels[1], selectors),
                   upper = pick_bytes(levels[2], levels[3], selectors);
    return (lower & ~is_upper) | (upper & is_upper);
  }
};
// kIq4Levels
GPU_FN LevelTable iq4_levels() {
  return {
      {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u}
  };
}

// What a group's codes are multiplied by: q6_k, q3_k and q2_k have a factor for each half of a
// group, the other formats the same for both. q4_k, q5_k and q2_k then subtract an offset, which is
// dmin * minimum; q4_1 and q5_1 subtract -m, and int4_zp scale * zero.
struct GroupScale {
  float factors[2];
  float offsets[2];
};

// The products d * scale and dmin * minimum of a group of q4_k or q5_k, from d, dmin and the 12
// bytes of six-bit scales and minima.
GPU_FN GroupScale k_affine(const Unit& head, uint32_t group) {
  const uint32_t a = byte_of(head.words[1], group), b = byte_of(head.words[2], group),
                 c = byte_of(head.words[3], group);
  const uint32_t scale = group < 4 ? a & 63u : (c & 15u) | (a >> 6) << 4;
  const uint32_t minimum = group < 4 ? b & 63u : c >> 4 | (b >> 6) << 4;
  const float factor = mul(widen_f16(half_of(head.words[0], 0)), static_cast<float>(scale));
  const float offset = mul(widen_f16(half_of(head.words[0], 1)), static_cast<float>(minimum));
  return {
      {factor, factor},
      {offset, offset}
  };
}

// Scale 2 * group + part of q3_k, from the 12 bytes of scales and d. The word is chosen by value:
// an index that is not a constant would keep the whole group in a thread's memory instead of
// registers.
GPU_FN float q3_k_factor(const Unit& tail, uint32_t group, uint32_t part) {
  const uint32_t index = 2 * group + part;
  const uint32_t lows = index / 4 % 2 == 0 ? tail.words[0] : tail.words[1];
  const uint32_t low = byte_of(lows, index) >> (index / 8 * 4) & 15u;
  const uint32_t scale = low | (byte_of(tail.words[2], index) >> (index / 4 * 2) & 3u) << 4;
  return mul(widen_f16(half_of(tail.words[3], 0)),
             static_cast<float>(static_cast<int32_t>(scale) - 32));
}

// The scales of a group of q2_k, from their bytes and d beside dmin.
GPU_FN GroupScale q2_k_scale(uint32_t scales, uint32_t factors, uint32_t group) {
  const float d = widen_f16(half_of(factors, 0)), dmin = widen_f16(half_of(factors, 1));
  const uint32_t bytes = half_of(scales, group);
  return {
      {mul(d,    static_cast<float>(bytes & 15u)),      mul(d, static_cast<float>(bytes >> 8 & 15u))},
      {mul(dmin, static_cast<float>(bytes >> 4 & 15u)),
       mul(dmin,                                               static_cast<float>(bytes >> 12))     }
  };
}

template <WeightFormat kFormat>
GPU_FN GroupScale group_scale(const StoredGroup<kFormat>& stored, uint32_t group) {
  if constexpr (is_k_affine(kFormat)) {
    return k_affine(stored.units[2], group);
  } else if constexpr (kFormat == WeightFormat::kInt4Zp) {
    const float factor = float_of(stored.scales[0] & ~31u);
    const float offset = mul(factor, static_cast<float>(stored.scales[0] & 31u));
    return {
        {factor, factor},
        {offset, offset}
    };
  } else if constexpr (kFormat == WeightFormat::kQ6K) {
    const float d = widen_f16(half_of(stored.scales[1], 0));
    const uint32_t first = group % 2 * 2;
    return {
        {mul(d, static_cast<float>(signed_byte(byte_of(stored.scales[0], first)))),
         mul(d, static_cast<float>(signed_byte(byte_of(stored.scales[0], first + 1))))},
        {0.0f, 0.0f}
    };
  } else if constexpr (kFormat == WeightFormat::kQ3K) {
    return {
        {q3_k_factor(stored.units[4], group, 0), q3_k_factor(stored.units[4], group, 1)},
        {0.0f, 0.0f}
    };
  } else if constexpr (kFormat == WeightFormat::kQ2K) {
    return q2_k_scale(stored.scales[0], stored.scales[1], group);
  } else {
    float factor = 1.0f, offset = 0.0f;
    if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kGgufMxfp4) {
      // The codes are decoded to twice their values, hence the half; the product is exact.
      factor = mul(widen_e8m0(byte_of(stored.scales[0], group)), 0.5f);
    } else if constexpr (kFormat == WeightFormat::kIq4Xs) {
      const uint32_t low = byte_of(stored.scales[1], group / 2) >> (group % 2 * 4) & 15u;
      const uint32_t scale = low | (half_of(stored.scales[0], 1) >> (2 * group) & 3u) << 4;
      factor = mul(widen_f16(half_of(stored.scales[0], 0)),
                   static_cast<float>(static_cast<int32_t>(scale) - 32));
    } else if constexpr (kFormat == WeightFormat::kQ8_0 || kFormat == WeightFormat::kQ4_0 ||
                         kFormat == WeightFormat::kIq4Nl) {
      factor = widen_f16(half_of(stored.scales[0], group));
    } else if constexpr (has_added_minimum(kFormat)) {
      factor = widen_f16(half_of(stored.scales[0], 0));
      offset = float_of(bits_of(widen_f16(half_of(stored.scales[0], 1))) ^ 0x80000000u);
    } else if constexpr (kFormat == WeightFormat::kQ5_0) {
      factor = widen_f16(half_of(stored.scales[0], group));
    } else if constexpr (group_scale_words(kFormat) != 0) {
      factor = float_of(stored.scales[0]);
    }
    return {
        {factor, factor},
        {offset, offset}
    };
  }
}

// Makes four weights of four codes.
template <WeightFormat kFormat>
GPU_FN void decode_codes(uint32_t codes, float factor, float offset, float* weights) {
  uint32_t looked_up = codes;
  if constexpr (kFormat == WeightFormat::kIq4Nl || kFormat == WeightFormat::kIq4Xs)
    looked_up = iq4_levels()(codes);
  if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kGgufMxfp4) {
    looked_up = pick_bytes(0x03020100u, 0x0c080604u, codes & 0x07070707u);  // twice the magnitude
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t byte = byte_of(looked_up, i);
    const float size = static_cast<float>(byte);
    if constexpr (is_k_affine(kFormat) || has_added_minimum(kFormat) ||
                  kFormat == WeightFormat::kQ2K || kFormat == WeightFormat::kInt4Zp) {
      weights[i] = sub(mul(factor, size), offset);
    } else if constexpr (kFormat == WeightFormat::kQ6K) {
      weights[i] = add(mul(factor, sub(size, 32.0f)), 0.0f);  // no negative zeros
    } else if constexpr (kFormat == WeightFormat::kInt4G32 || kFormat == WeightFormat::kQ4_0) {
      weights[i] = mul(sub(size, 8.0f), factor);
    } else if constexpr (kFormat == WeightFormat::kQ3K) {
      weights[i] = mul(factor, sub(size, 4.0f));
    } else if constexpr (kFormat == WeightFormat::kQ5_0) {
      weights[i] = mul(sub(size, 16.0f), factor);
    } else if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kGgufMxfp4) {
      weights[i] = mul(float_of(bits_of(size) | (codes >> (8 * i) & 8u) << 28), factor);
    } else if constexpr (kFormat == WeightFormat::kFp8E4m3B128) {
      weights[i] = mul(widen_e4m3(byte), factor);
    } else {
      weights[i] = mul(static_cast<float>(signed_byte(byte)), factor);
    }
  }
}

// Decodes the weights of inputs [8 * octet, 8 * octet + 8) of the group.
template <WeightFormat kFormat>
GPU_FN void decode_octet(const StoredGroup<kFormat>& stored, const GroupScale& scale,
                         uint32_t group, uint32_t octet, float* weights) {
  if constexpr (kFormat == WeightFormat::kF32) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kOctet; ++i)
      weights[i] = float_of(stored.units[2 * octet + i / 4].words[i % 4]);
  } else if constexpr (kFormat == WeightFormat::kF16 || kFormat == WeightFormat::kBF16) {
    GPU_UNROLL
    for (uint32_t i = 0; i < kOctet; ++i) {
      const uint32_t half = half_of(stored.units[octet].words[i / 2], i);
      weights[i] = kFormat == WeightFormat::kF16 ? widen_f16(half) : widen_bf16(half);
    }
  } else {
    GPU_UNROLL
    for (uint32_t w = 0; w < 2; ++w) {
      const uint32_t codes = code_word<kFormat>(stored, group, 2 * octet + w);
      decode_codes<kFormat>(codes, scale.factors[octet / 2], scale.offsets[octet / 2],
                            weights + 4 * w);
    }
  }
}

template <WeightFormat kFormat>
GPU_FN void decode_stored(const StoredGroup<kFormat>& stored, uint32_t group, float* weights) {
  const GroupScale scale = group_scale<kFormat>(stored, group);
  GPU_UNROLL
  for (uint32_t octet = 0; octet < kGroupOctets; ++octet)
    decode_octet<kFormat>(stored, scale, group, octet, weights + octet * kOctet);
}

// Decodes the weights of inputs [32 * group, 32 * group + 32) of the record.
template <WeightFormat kFormat>
GPU_FN void decode_group(const Record& record, uint32_t group, float* weights) {
  decode_stored<kFormat>(load_group<kFormat>(record, group), group, weights);
}

}  // namespace dflash::compute::gpu
