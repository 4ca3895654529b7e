// Dequantises GGUF's block types as ggml defines them, and int4_zp, one value at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute::internal {
namespace {

int8_t as_signed(uint8_t byte) { return static_cast<int8_t>(byte); }

// A block of q4_k has d and dmin (f16), 12 bytes of scales and minima, and 128 bytes of nibbles,
// the low ones of group 2i with the high ones of group 2i + 1. In q5_k, the fifth bits of group g
// are bit g of 32 bytes that lie before the nibbles.
void dequantize_k_affine(const uint8_t* block, bool has_fifth_bit, float* values) {
  const float d = f16_to_f32(load_u16(block)), dmin = f16_to_f32(load_u16(block + 2));
  const uint8_t* fifth = block + 16;
  const uint8_t* nibbles = has_fifth_bit ? block + 48 : block + 16;
  for (uint32_t group = 0; group < 8; ++group) {
    uint8_t scale, minimum;
    k_scale(block + 4, group, &scale, &minimum);
    const float factor = d * static_cast<float>(scale), offset = dmin * static_cast<float>(minimum);
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t pair = nibbles[group / 2 * 32 + i];
      uint32_t code = group % 2 == 0 ? pair & 15u : pair >> 4;
      if (has_fifth_bit) code |= (uint32_t{fifth[i]} >> group & 1u) << 4;
      const float product = factor * static_cast<float>(code);
      values[group * 32 + i] = product - offset;
    }
  }
}

// A block of q6_k has 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales (one per 16
// values) and d. In each half of 128 values, value 32j + i has nibble (j / 2) of low byte
// (j % 2) * 32 + i, and bit pair j of high byte i.
void dequantize_q6_k(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block + 208));
  for (uint32_t k = 0; k < 256; ++k) {
    const uint32_t half = k / 128, j = k % 128 / 32, i = k % 32;
    const uint32_t low = uint32_t{block[half * 64 + j % 2 * 32 + i]} >> (j / 2 * 4) & 15u;
    const uint32_t high = uint32_t{block[128 + half * 32 + i]} >> (2 * j) & 3u;
    const float factor = d * static_cast<float>(as_signed(block[192 + k / 16]));
    // Adding zero makes a negative zero positive.
    values[k] = factor * static_cast<float>(static_cast<int32_t>(low | high << 4) - 32) + 0.0f;
  }
}

// A block of iq4_xs has d, 16 bits with the upper pairs of the scales, 4 bytes with their lower
// nibbles, and 8 x 16 bytes of nibbles, in which the low ones are the first half of a group.
void dequantize_iq4_xs(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block));
  const uint32_t high = load_u16(block + 2);
  for (uint32_t group = 0; group < 8; ++group) {
    const uint32_t low = uint32_t{block[4 + group / 2]} >> (group % 2 * 4) & 15u;
    const uint32_t scale = low | (high >> (2 * group) & 3u) << 4;
    const float factor = d * static_cast<float>(static_cast<int32_t>(scale) - 32);
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t pair = block[8 + group * 16 + i % 16];
      values[group * 32 + i] = factor * kIq4Levels[i < 16 ? pair & 15u : pair >> 4];
    }
  }
}

// A block of q4_1, q5_0 or q5_1 has d, then m (f16) but in q5_0, then in q5_0 and q5_1 the fifth
// bits of its 32 codes, and 16 bytes of nibbles, in which the low ones are the first half.
void dequantize_q4_1_or_q5(WeightFormat format, const uint8_t* block, float* values) {
  const bool has_minimum = format != WeightFormat::kQ5_0;
  const bool has_fifth_bit = format != WeightFormat::kQ4_1;
  const float d = f16_to_f32(load_u16(block)),
              m = has_minimum ? f16_to_f32(load_u16(block + 2)) : 0.0f;
  const uint8_t* fifth = block + (has_minimum ? 4 : 2);
  const uint8_t* nibbles = fifth + (has_fifth_bit ? 4 : 0);
  for (uint32_t i = 0; i < 32; ++i) {
    uint32_t code = i < 16 ? nibbles[i] & 15u : nibbles[i - 16] >> 4;
    if (has_fifth_bit) code |= (uint32_t{fifth[i / 8]} >> i % 8 & 1u) << 4;
    const float product = d * static_cast<float>(code);
    values[i] = has_minimum ? product + m : static_cast<float>(static_cast<int32_t>(code) - 16) * d;
  }
}

// A block of q3_k has 32 bytes of third bits, 64 of lower bit pairs, 12 of scales (one per 16
// values) and d. In each half of 128 values, value 32j + i has bit pair j of byte i, and its third
// bit is bit j (in the second half j + 4) of byte i.
void dequantize_q3_k(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block + 108));
  for (uint32_t k = 0; k < 256; ++k) {
    const uint32_t half = k / 128, j = k % 128 / 32, i = k % 32;
    const uint32_t low = uint32_t{block[32 + half * 32 + i]} >> (2 * j) & 3u;
    const uint32_t third = uint32_t{block[i]} >> (4 * half + j) & 1u;
    const auto scale = static_cast<int32_t>(q3_k_scale(block + 96, k / 16));
    const float factor = d * static_cast<float>(scale - 32);
    values[k] = factor * static_cast<float>(static_cast<int32_t>(low | third << 2) - 4);
  }
}

// A block of q2_k has 16 bytes with a scale in the low nibble and a minimum in the high one (for 16
// values each), 64 of bit pairs in the order of q3_k's, d and dmin.
void dequantize_q2_k(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block + 80)), dmin = f16_to_f32(load_u16(block + 82));
  for (uint32_t k = 0; k < 256; ++k) {
    const uint32_t half = k / 128, j = k % 128 / 32, i = k % 32;
    const uint32_t code = uint32_t{block[16 + half * 32 + i]} >> (2 * j) & 3u;
    const uint32_t scales = block[k / 16];
    const float factor = d * static_cast<float>(scales & 15u),
                offset = dmin * static_cast<float>(scales >> 4);
    const float product = factor * static_cast<float>(code);
    values[k] = product - offset;
  }
}

// The zero point times the scale is exact, five bits times nineteen, and so is the difference.
void dequantize_int4_zp(const uint8_t* block, float* values) {
  const uint32_t word = load_u32(block);
  const float scale = int4_scale(word), offset = scale * int4_zero(word);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t code = block[4 + i / 2] >> (i % 2 * 4) & 15u;
    const float product = scale * static_cast<float>(code);
    values[i] = product - offset;
  }
}

}  // namespace

uint32_t load_u32(const uint8_t* bytes) {
  return load_u16(bytes) | static_cast<uint32_t>(load_u16(bytes + 2)) << 16;
}

uint16_t load_u16(const uint8_t* bytes) { return static_cast<uint16_t>(bytes[0] | bytes[1] << 8); }

void k_scale(const uint8_t* packed, uint32_t group, uint8_t* scale, uint8_t* minimum) {
  if (group < 4) {
    *scale = packed[group] & 63;
    *minimum = packed[group + 4] & 63;
    return;
  }
  *scale = static_cast<uint8_t>((packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4);
  *minimum = static_cast<uint8_t>((packed[group + 4] >> 4) | (packed[group] >> 6) << 4);
}

uint32_t q3_k_scale(const uint8_t* packed, uint32_t group) {
  const uint32_t low = uint32_t{packed[group % 8]} >> (group / 8 * 4) & 15u;
  return low | (uint32_t{packed[8 + group % 4]} >> (group / 4 * 2) & 3u) << 4;
}

void dequantize_block_32(WeightFormat format, const uint8_t* block, float* values) {
  if (format == WeightFormat::kInt4Zp) return dequantize_int4_zp(block, values);
  if (format == WeightFormat::kQ8_0) {
    const float d = f16_to_f32(load_u16(block));
    for (uint32_t i = 0; i < 32; ++i) values[i] = static_cast<float>(as_signed(block[2 + i])) * d;
    return;
  }
  if (format == WeightFormat::kQ4_1 || format == WeightFormat::kQ5_0 ||
      format == WeightFormat::kQ5_1)
    return dequantize_q4_1_or_q5(format, block, values);
  const bool is_mxfp4 = format == WeightFormat::kGgufMxfp4;
  const float scale = is_mxfp4 ? e8m0_to_f32(block[0]) : f16_to_f32(load_u16(block));
  const uint8_t* nibbles = block + (is_mxfp4 ? 1 : 2);
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t code = i < 16 ? nibbles[i] & 15u : nibbles[i - 16] >> 4;
    const float value = is_mxfp4 ? kE2m1[code]
                        : format == WeightFormat::kIq4Nl
                            ? kIq4Levels[code]
                            : static_cast<float>(static_cast<int32_t>(code) - 8);
    values[i] = value * scale;
  }
}

void dequantize_block_256(WeightFormat format, const uint8_t* block, float* values) {
  if (has_grid(format)) return dequantize_grid_block(format, block, values);
  switch (format) {
    case WeightFormat::kQ4K: return dequantize_k_affine(block, false, values);
    case WeightFormat::kQ5K: return dequantize_k_affine(block, true, values);
    case WeightFormat::kQ6K: return dequantize_q6_k(block, values);
    case WeightFormat::kQ3K: return dequantize_q3_k(block, values);
    case WeightFormat::kQ2K: return dequantize_q2_k(block, values);
    default:                 return dequantize_iq4_xs(block, values);
  }
}

}  // namespace dflash::compute::internal
