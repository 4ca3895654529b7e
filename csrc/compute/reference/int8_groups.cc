// Reads the integer codes, scales and offsets of every format one value at a time, and multiplies
// them with a row's codes.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/int8_groups.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kBlock = 256;  // inputs per chain
constexpr uint32_t kGroup = 32;   // inputs per scale of a row

// The inputs of a group of codes with one scale.
uint32_t integer_group_inputs(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ6K:
    case WeightFormat::kQ3K:
    case WeightFormat::kQ2K:
    case WeightFormat::kIq2Xs:
    case WeightFormat::kIq2S:  return 16;
    default:                   return 32;
  }
}

// Where the codes, scales and offsets of one output go.
struct Target {
  int32_t* codes;
  float* scales;
  float* offsets;
};

float f16_at(const uint8_t* bytes) { return f16_to_f32(internal::load_u16(bytes)); }
int32_t signed_byte(uint8_t byte) { return byte < 128 ? byte : byte - 256; }
uint32_t nibble(const uint8_t* bytes, uint32_t i) {
  return i < 16 ? bytes[i] & 15u : bytes[i - 16] >> 4;
}
int32_t level(uint32_t code) { return static_cast<int32_t>(kIq4Levels[code]); }
int32_t doubled_e2m1(uint32_t code) { return static_cast<int32_t>(2.0f * kE2m1[code]); }

// Reads a block of q4_1, q5_0 or q5_1. Adding m is subtracting the offset -m.
void read_q4_1_or_q5(WeightFormat format, const uint8_t* block, const Target& to) {
  const bool has_minimum = is_affine(format);
  const uint8_t* fifth = block + (has_minimum ? 4 : 2);
  const uint8_t* nibbles = fifth + (format == WeightFormat::kQ4_1 ? 0 : 4);
  to.scales[0] = f16_at(block);
  if (has_minimum) to.offsets[0] = -f16_at(block + 2);
  for (uint32_t i = 0; i < 32; ++i) {
    to.codes[i] = static_cast<int32_t>(nibble(nibbles, i)) - (has_minimum ? 0 : 16);
    if (format != WeightFormat::kQ4_1 && (fifth[i / 8] >> i % 8 & 1) != 0) to.codes[i] += 16;
  }
}

// Reads GGUF's blocks of 32 values.
void read_block_32(WeightFormat format, const uint8_t* block, const Target& to) {
  if (format == WeightFormat::kGgufMxfp4) {
    to.scales[0] = e8m0_to_f32(block[0]) * 0.5f;
    for (uint32_t i = 0; i < 32; ++i) to.codes[i] = doubled_e2m1(nibble(block + 1, i));
    return;
  }
  to.scales[0] = f16_at(block);
  for (uint32_t i = 0; i < 32; ++i) {
    if (format == WeightFormat::kQ8_0)
      to.codes[i] = signed_byte(block[2 + i]);
    else if (format == WeightFormat::kQ4_0)
      to.codes[i] = static_cast<int32_t>(nibble(block + 2, i)) - 8;
    else
      to.codes[i] = level(nibble(block + 2, i));
  }
}

void read_int4_zp(const uint8_t* block, const Target& to) {
  const uint32_t word = internal::load_u32(block);
  to.scales[0] = int4_scale(word);
  to.offsets[0] = to.scales[0] * int4_zero(word);
  for (uint32_t i = 0; i < 32; ++i)
    to.codes[i] = static_cast<int32_t>(block[4 + i / 2] >> (i % 2 * 4) & 15u);
}

void read_k_affine(bool has_fifth_bit, const uint8_t* block, const Target& to) {
  const uint8_t* nibbles = block + (has_fifth_bit ? 48 : 16);
  for (uint32_t group = 0; group < 8; ++group) {
    uint8_t scale, minimum;
    internal::k_scale(block + 4, group, &scale, &minimum);
    to.scales[group] = f16_at(block) * static_cast<float>(scale);
    to.offsets[group] = f16_at(block + 2) * static_cast<float>(minimum);
    for (uint32_t i = 0; i < 32; ++i) {
      const uint32_t pair = nibbles[group / 2 * 32 + i];
      uint32_t code = group % 2 == 0 ? pair & 15u : pair >> 4;
      if (has_fifth_bit && (block[16 + i] >> group & 1) != 0) code += 16;
      to.codes[32 * group + i] = static_cast<int32_t>(code);
    }
  }
}

void read_q6_k(const uint8_t* block, const Target& to) {
  for (uint32_t group = 0; group < 16; ++group)
    to.scales[group] = f16_at(block + 208) * static_cast<float>(signed_byte(block[192 + group]));
  for (uint32_t k = 0; k < 256; ++k) {
    const uint32_t half = k / 128, quarter = k % 128 / 32, i = k % 32;
    const uint32_t low =
        uint32_t{block[half * 64 + quarter % 2 * 32 + i]} >> (quarter / 2 * 4) & 15u;
    const uint32_t high = uint32_t{block[128 + half * 32 + i]} >> (2 * quarter) & 3u;
    to.codes[k] = static_cast<int32_t>(low + 16 * high) - 32;
  }
}

// Returns the bit pair of value k of q2_k or q3_k; `pairs` are its 64 bytes of them.
int32_t bit_pair(const uint8_t* pairs, uint32_t k) {
  return pairs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
}

void read_q3_k(const uint8_t* block, const Target& to) {
  for (uint32_t group = 0; group < 16; ++group) {
    const auto scale = static_cast<int32_t>(internal::q3_k_scale(block + 96, group));
    to.scales[group] = f16_at(block + 108) * static_cast<float>(scale - 32);
  }
  for (uint32_t k = 0; k < 256; ++k)
    to.codes[k] = bit_pair(block + 32, k) + 4 * (block[k % 32] >> (k / 32) & 1) - 4;
}

void read_q2_k(const uint8_t* block, const Target& to) {
  for (uint32_t group = 0; group < 16; ++group) {
    to.scales[group] = f16_at(block + 80) * static_cast<float>(block[group] & 15);
    to.offsets[group] = f16_at(block + 82) * static_cast<float>(block[group] >> 4);
  }
  for (uint32_t k = 0; k < 256; ++k) to.codes[k] = bit_pair(block + 16, k);
}

void read_iq4_xs(const uint8_t* block, const Target& to) {
  for (uint32_t group = 0; group < 8; ++group) {
    const uint32_t low = uint32_t{block[4 + group / 2]} >> (group % 2 * 4) & 15u;
    const uint32_t high = uint32_t{internal::load_u16(block + 2)} >> (2 * group) & 3u;
    to.scales[group] =
        f16_at(block) * static_cast<float>(static_cast<int32_t>(low + 16 * high) - 32);
    for (uint32_t i = 0; i < 32; ++i)
      to.codes[32 * group + i] = level(nibble(block + 8 + 16 * group, i));
  }
}

// The formats with grids, whose groups have 32 inputs, or 16 in iq2_xs and iq2_s.
void read_grid(WeightFormat format, const uint8_t* block, const Target& to) {
  const internal::GridBlock opened = internal::open_grid_block(format, block);
  const uint32_t group_inputs = integer_group_inputs(format);
  for (uint32_t group = 0; group < 256 / group_inputs; ++group)
    to.scales[group] = internal::grid_factor(format, opened, group * (group_inputs / 16));
  for (uint32_t k = 0; k < 256; ++k) {
    const int32_t magnitude = internal::grid_magnitude(format, opened, k);
    to.codes[k] = (opened.signs[k / 8] >> (k % 8) & 1) != 0 ? -magnitude : magnitude;
  }
}

void read_block(WeightFormat format, const uint8_t* block, const Target& to) {
  if (has_grid(format)) return read_grid(format, block, to);
  switch (format) {
    case WeightFormat::kQ4K:    return read_k_affine(false, block, to);
    case WeightFormat::kQ5K:    return read_k_affine(true, block, to);
    case WeightFormat::kQ6K:    return read_q6_k(block, to);
    case WeightFormat::kQ3K:    return read_q3_k(block, to);
    case WeightFormat::kQ2K:    return read_q2_k(block, to);
    case WeightFormat::kIq4Xs:  return read_iq4_xs(block, to);
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:   return read_q4_1_or_q5(format, block, to);
    case WeightFormat::kInt4Zp: return read_int4_zp(block, to);
    default:                    return read_block_32(format, block, to);
  }
}

// Reads the mxfp4 of safetensors, in which pairs of inputs are side by side and scales lie apart.
void read_mxfp4(const MatrixView& matrix, uint32_t output, const Target& to) {
  const auto* row = reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride);
  const std::byte* scales = matrix.scales + output * matrix.scales_stride;
  for (uint32_t i = 0; i < matrix.inputs; ++i) {
    to.codes[i] = doubled_e2m1(i % 2 == 0 ? row[i / 2] & 15u : row[i / 2] >> 4);
    to.scales[i / kGroup] = e8m0_to_f32(static_cast<uint8_t>(scales[i / kGroup])) * 0.5f;
  }
}

// Quantises a row of floats to int8_g32 or int4_g32.
void quantise_row(const MatrixView& matrix, uint32_t output, float limit, const Target& to) {
  std::vector<float> values((matrix.inputs + kGroup - 1) / kGroup * kGroup, 0.0f);
  dequantize(matrix, output, 1, values.data());
  for (uint32_t i = 0; i < matrix.inputs; i += kGroup) {
    int8_t integers[kGroup];
    to.scales[i / kGroup] = quantize_group(values.data() + i, limit, integers);
    std::copy_n(integers, std::min(kGroup, matrix.inputs - i), to.codes + i);
  }
}

}  // namespace

Int8Codes int8_codes(const float* values, size_t num_inputs) {
  Int8Codes found;
  for (size_t begin = 0; begin < num_inputs; begin += kGroup) {
    const size_t end = std::min(begin + kGroup, num_inputs);
    float largest = 0.0f;
    bool is_finite = true;
    for (size_t i = begin; i < end; ++i) {
      is_finite = is_finite && std::isfinite(values[i]);
      largest = std::max(largest, std::fabs(values[i]));
    }
    const float scale = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
    found.scales.push_back(scale);
    for (size_t i = begin; i < end; ++i) {
      const float rounded = scale > 0.0f ? std::nearbyint(values[i] / scale) : 0.0f;
      found.codes.push_back(static_cast<int32_t>(std::clamp(rounded, -127.0f, 127.0f)));
    }
  }
  return found;
}

IntegerWeights integer_weights(const MatrixView& matrix, WeightFormat resident) {
  IntegerWeights found;
  found.inputs = matrix.inputs;
  found.group_inputs = integer_group_inputs(resident);
  const bool has_offsets = is_affine(resident);
  const size_t num_groups = found.num_groups();
  found.codes.resize(size_t{matrix.outputs} * matrix.inputs);
  found.scales.resize(matrix.outputs * num_groups);
  found.offsets.resize(has_offsets ? matrix.outputs * num_groups : 0);
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    Target to{found.codes.data() + size_t{o} * matrix.inputs, found.scales.data() + o * num_groups,
              has_offsets ? found.offsets.data() + o * num_groups : nullptr};
    if (!format_facts(resident).is_stored)
      quantise_row(matrix, o, resident == WeightFormat::kInt8G32 ? 127.0f : 7.0f, to);
    else if (resident == WeightFormat::kMxfp4)
      read_mxfp4(matrix, o, to);
    else {
      const FormatFacts& facts = format_facts(resident);
      const auto* block = reinterpret_cast<const uint8_t*>(matrix.data + o * matrix.output_stride);
      for (uint32_t i = 0; i < matrix.inputs; i += facts.block, block += facts.block_bytes) {
        read_block(resident, block, to);
        to.codes += facts.block;
        to.scales += facts.block / found.group_inputs;
        if (has_offsets) to.offsets += facts.block / found.group_inputs;
      }
    }
  }
  return found;
}

float int8_dot(const IntegerWeights& weights, size_t output, const Int8Codes& row) {
  const int32_t* codes = weights.codes.data() + output * weights.inputs;
  const size_t first_group = output * weights.num_groups();
  float total = 0.0f, chain = 0.0f;
  for (uint32_t begin = 0; begin < weights.inputs; begin += weights.group_inputs) {
    if (begin % kBlock == 0) {
      total = begin <= kBlock ? chain : total + chain;
      chain = 0.0f;
    }
    int32_t dot = 0, sum = 0;
    for (uint32_t i = begin; i < std::min(begin + weights.group_inputs, weights.inputs); ++i) {
      dot += codes[i] * row.codes[i];
      sum += row.codes[i];
    }
    const size_t group = first_group + begin / weights.group_inputs;
    const float row_scale = row.scales[begin / kGroup];
    chain = std::fmaf(static_cast<float>(dot), weights.scales[group] * row_scale, chain);
    if (!weights.offsets.empty())
      chain = std::fmaf(0.0f - weights.offsets[group], row_scale * static_cast<float>(sum), chain);
  }
  return weights.inputs <= kBlock ? chain : total + chain;
}

}  // namespace dflash::compute
