// Dequantises the blocks of the GGUF types without kernels of their own as ggml defines them, one
// value at a time.
//
//   iq1_s  d, 32 bytes of indices, 8 u16: four times three upper bits, a scale, the sign of delta
//   iq1_m  32 bytes of indices, 16 bytes of upper bits and signs of delta in nibbles, 4 u16: four
//          scales of three bits, and a quarter of d in the top bits
//   tq1_0  48 and 4 bytes of five and four base-3 digits each, d
//   tq2_0  64 bytes of bit pairs, d
//   nvfp4  4 unsigned e4m3 scales, 4 x 8 bytes of nibbles
// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cmath>

#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute::internal {
namespace {

// Eight values of the iq1 grid, -1, 0 or 1, moved by `delta`.
void put_octet(uint32_t entry, float delta, float factor, float* values) {
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t word = kGridTable.words[kFirstIq1Word + 2 * entry + i / 4];
    const auto value = static_cast<int8_t>(word >> (i % 4 * 8) & 255u);
    values[i] = factor * (static_cast<float>(value) + delta);
  }
}

void dequantize_iq1_s(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block));
  for (uint32_t octet = 0; octet < 32; ++octet) {
    const uint32_t high = load_u16(block + 34 + octet / 4 * 2);
    const float factor = d * static_cast<float>(2 * (high >> 12 & 7u) + 1);
    const uint32_t entry = block[2 + octet] | (high >> (octet % 4 * 3) & 7u) << 8;
    put_octet(entry, (high & 0x8000u) != 0 ? -0.125f : 0.125f, factor, values + size_t{8} * octet);
  }
}

void dequantize_iq1_m(const uint8_t* block, float* values) {
  const float d = f16_to_f32(iq1_m_scale(block));
  for (uint32_t octet = 0; octet < 32; ++octet) {
    const uint32_t scales = load_u16(block + 48 + octet / 8 * 2);
    const float factor = d * static_cast<float>(2 * (scales >> (octet / 2 % 4 * 3) & 7u) + 1);
    const uint32_t high = uint32_t{block[32 + octet / 2]} >> (octet % 2 * 4);
    const uint32_t entry = block[octet] | (high & 7u) << 8;
    put_octet(entry, (high & 8u) != 0 ? -0.125f : 0.125f, factor, values + size_t{8} * octet);
  }
}

// A byte holds its digits as a fraction of 256: multiplying by three brings the next one to the
// top.
float base_3_digit(uint8_t byte, uint32_t power) {
  const auto turned = static_cast<uint8_t>(byte * power);
  return static_cast<float>((static_cast<int32_t>(turned) * 3 >> 8) - 1);
}

void dequantize_tq1_0(const uint8_t* block, float* values) {
  constexpr uint32_t kPowers[] = {1, 3, 9, 27, 81};
  const float d = f16_to_f32(load_u16(block + 52));
  struct Run {
    uint32_t first_byte, bytes, digits;
  };
  for (const Run& run : {
           Run{0,  32, 5},
           {32, 16, 5},
           {48, 4,  4}
  }) {
    for (uint32_t digit = 0; digit < run.digits; ++digit) {
      for (uint32_t i = 0; i < run.bytes; ++i)
        *values++ = d * base_3_digit(block[run.first_byte + i], kPowers[digit]);
    }
  }
}

void dequantize_tq2_0(const uint8_t* block, float* values) {
  const float d = f16_to_f32(load_u16(block + 64));
  for (uint32_t k = 0; k < 256; ++k) {
    const uint32_t code = uint32_t{block[k / 128 * 32 + k % 32]} >> (k % 128 / 32 * 2) & 3u;
    values[k] = d * static_cast<float>(static_cast<int32_t>(code) - 1);
  }
}

void dequantize_nvfp4(const uint8_t* block, float* values) {
  for (uint32_t k = 0; k < 64; ++k) {
    const uint32_t byte = block[4 + k / 16 * 8 + k % 8], code = k % 16 < 8 ? byte & 15u : byte >> 4;
    // The doubled codes are integers in ggml, which have no negative zero.
    const float doubled = code == 8 ? 0.0f : 2.0f * kE2m1[code];
    values[k] = nvfp4_scale(block[k / 16]) * doubled;
  }
}

}  // namespace

uint16_t iq1_m_scale(const uint8_t* block) {
  uint32_t d = 0;
  for (uint32_t i = 0; i < 4; ++i) d |= (uint32_t{load_u16(block + 48 + 2 * i)} >> 12) << (4 * i);
  return static_cast<uint16_t>(d);
}

float nvfp4_scale(uint8_t code) {
  if (code == 0x7f) return 0.0f;
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const int significand = exponent == 0 ? mantissa : 8 + mantissa;
  return std::ldexp(static_cast<float>(significand), (exponent == 0 ? 1 : exponent) - 11);
}

void dequantize_mapped_block(WeightFormat format, const uint8_t* block, float* values) {
  switch (format) {
    case WeightFormat::kIq1S:  return dequantize_iq1_s(block, values);
    case WeightFormat::kIq1M:  return dequantize_iq1_m(block, values);
    case WeightFormat::kTq1_0: return dequantize_tq1_0(block, values);
    case WeightFormat::kTq2_0: return dequantize_tq2_0(block, values);
    default:                   return dequantize_nvfp4(block, values);
  }
}

}  // namespace dflash::compute::internal
