// Takes one lane of a panel apart. Each format's formula is that of dequantize.h, written once more
// for the order of a panel: what lies behind it is a gather of scalars, bound by its cache misses.
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "compute/cpu/panels/pack.h"
#include "compute/cpu/panels/panel_layout.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute {
namespace {

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

void unpack_floats(const PackedOutput& output, float* values) {
  const Dtype dtype = dtype_of(output.format);
  const uint32_t at =
      place_in_step(output.lane, output.width, output.format == WeightFormat::kBF16);
  const size_t step = dtype_bytes(dtype) * output.width;
  const std::byte* from = output.panel + dtype_bytes(dtype) * at;
  for (uint32_t k = 0; k < output.inputs; ++k, from += step) {
    values[k] = dtype == Dtype::kF32   ? load<float>(from)
                : dtype == Dtype::kF16 ? f16_to_f32(load<uint16_t>(from))
                                       : bf16_to_f32(load<uint16_t>(from));
  }
}

// The fields of one output within a record, found by their bytes per output.
struct Record {
  const std::byte* first;
  uint32_t width, lane;

  template <class T>
  T field(size_t bytes_before, size_t index = 0) const {
    return load<T>(first + (bytes_before + index * sizeof(T)) * width + lane * sizeof(T));
  }
  float f16(size_t bytes_before, size_t index = 0) const {
    return f16_to_f32(field<uint16_t>(bytes_before, index));
  }
};

uint32_t nibble(const Record& record, size_t words, uint32_t i) {
  return record.field<uint32_t>(words, i / 8) >> (i % 8 * 4) & 15u;
}

// The bit pair of input `i` of a group of q2_k or q3_k.
uint32_t bit_pair(const Record& record, size_t words, uint32_t i) {
  return record.field<uint32_t>(words) >> (i % 4 * 8 + i / 4 * 2) & 3u;
}

// The float32 by which the codes of a group are multiplied.
float group_factor(WeightFormat format, const Record& record, size_t group) {
  switch (format) {
    case WeightFormat::kInt8G32:
    case WeightFormat::kInt4G32:
    case WeightFormat::kFp8E4m3B128: return record.field<float>(group);
    case WeightFormat::kMxfp4:
    case WeightFormat::kGgufMxfp4:   return e8m0_to_f32(record.field<uint8_t>(group));
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
      return record.f16(0) * static_cast<float>(record.field<uint8_t>(group));
    case WeightFormat::kQ2K:
      return record.f16(0) * static_cast<float>(record.field<uint8_t>(group) & 15);
    case WeightFormat::kQ3K:
    case WeightFormat::kQ6K:
    case WeightFormat::kIq4Xs:
      return record.f16(0) * static_cast<float>(record.field<int8_t>(group));
    case WeightFormat::kInt4Zp: return int4_scale(record.field<uint32_t>(group));
    default:                    return record.f16(group);
  }
}

// The value of input `i` of a group before it is multiplied; `words` is where its codes begin.
float group_code(WeightFormat format, const Record& record, size_t words, uint32_t i) {
  switch (format) {
    case WeightFormat::kInt8G32:
    case WeightFormat::kQ8_0:    {
      const uint32_t byte = record.field<uint32_t>(words, i / 4) >> (i % 4 * 8) & 255u;
      return static_cast<float>(static_cast<int8_t>(byte));
    }
    case WeightFormat::kFp8E4m3B128: return e4m3_to_f32(record.field<uint8_t>(words, i));
    case WeightFormat::kMxfp4:
    case WeightFormat::kGgufMxfp4:   return kE2m1[nibble(record, words, i)];
    case WeightFormat::kIq4Nl:
    case WeightFormat::kIq4Xs:       return kIq4Levels[nibble(record, words, i)];
    case WeightFormat::kInt4Zp:
    case WeightFormat::kQ4K:
    case WeightFormat::kQ4_1:        return static_cast<float>(nibble(record, words, i));
    case WeightFormat::kQ5K:
    case WeightFormat::kQ5_0:
    case WeightFormat::kQ5_1:        {
      const uint32_t fifth = record.field<uint32_t>(words, 4) >> i & 1u;
      const auto code = static_cast<int32_t>(nibble(record, words, i) | fifth << 4);
      return static_cast<float>(format == WeightFormat::kQ5_0 ? code - 16 : code);
    }
    case WeightFormat::kQ6K: {
      const uint32_t shift = i % 8 / 2 * 8 + i / 8 * 4 + i % 2 * 2;
      const uint32_t upper = record.field<uint32_t>(words, 2) >> shift & 3u;
      return static_cast<float>(static_cast<int32_t>(nibble(record, words, i) | upper << 4) - 32);
    }
    case WeightFormat::kQ2K: return static_cast<float>(bit_pair(record, words, i));
    case WeightFormat::kQ3K: {
      const uint32_t shift = i % 4 % 2 * 8 + i % 4 / 2 * 4 + i / 4;
      const uint32_t third = uint32_t{record.field<uint16_t>(words, 2)} >> shift & 1u;
      return static_cast<float>(static_cast<int32_t>(bit_pair(record, words, i) | third << 2) - 4);
    }
    default: return static_cast<float>(static_cast<int32_t>(nibble(record, words, i)) - 8);
  }
}

// What is subtracted from the products of a group where the format is affine.
float group_offset(WeightFormat format, const Record& record, size_t group) {
  if (format == WeightFormat::kQ4_1 || format == WeightFormat::kQ5_1)
    return -record.f16(group + sizeof(uint16_t));
  if (format == WeightFormat::kQ2K)
    return record.f16(2) * static_cast<float>(record.field<uint8_t>(group) >> 4);
  if (format == WeightFormat::kInt4Zp) {
    const auto word = record.field<uint32_t>(group);
    return int4_scale(word) * int4_zero(word);
  }
  return record.f16(2) * static_cast<float>(record.field<uint8_t>(group + 1));
}

// The 32 inputs of a group of a format with a grid; panel_layout.h says where its bits lie.
void unpack_grid(WeightFormat format, const Record& record, uint32_t g, float* values) {
  const PanelLayout layout = panel_layout(format);
  const GridFacts grid = grid_facts(format);
  const size_t group = layout.header_bytes + g * layout.group_bytes();
  const size_t words = group + layout.scale_bytes;
  uint32_t signs = record.field<uint32_t>(words, 2 / grid.entry_words);
  const uint32_t spare = signs >> 28;
  const bool has_every_sign = format == WeightFormat::kIq3S || format == WeightFormat::kIq2S;
  if (!has_every_sign) {
    uint32_t odd = (signs & 0x0fffffffu) ^ (signs & 0x0fffffffu) >> 16;
    odd ^= odd >> 8;
    signs = (signs & 0x0fffffffu) | (odd ^ odd >> 4) << 28;
  }
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t octet = i / 8, place = i / (4 * grid.entry_words);
    uint32_t entry = record.field<uint32_t>(words, place / 4) >> (place % 4 * 8) & 255u;
    uint32_t scale = spare;
    if (format == WeightFormat::kIq3S) {
      entry |= (uint32_t{record.field<uint8_t>(group, 1)} >> place & 1u) << 8;
    } else if (format == WeightFormat::kIq2Xs || format == WeightFormat::kIq2S) {
      scale = uint32_t{record.field<uint8_t>(group)} >> (i / 16 * 4) & 15u;
      entry |= format == WeightFormat::kIq2Xs
                   ? (spare >> octet & 1u) << 8
                   : (uint32_t{record.field<uint8_t>(group, 1)} >> (2 * octet) & 3u) << 8;
    }
    const float factor = format == WeightFormat::kIq3S
                             ? record.f16(0) * static_cast<float>(record.field<uint8_t>(group))
                             : record.f16(0) * (0.5f + static_cast<float>(scale)) *
                                   (format == WeightFormat::kIq3Xxs ? 0.5f : 0.25f);
    const uint32_t word =
        kGridTable.words[grid.first_word + entry * grid.entry_words + i / 4 % grid.entry_words];
    const float magnitude = static_cast<float>(word >> (i % 4 * 8) & 255u);
    const bool is_negative = (signs >> (i % 4 * 8 + i / 4 % 2 * 4 + octet) & 1u) != 0;
    values[i] = factor * magnitude * (is_negative ? -1.0f : 1.0f);
  }
}

void unpack_group(WeightFormat format, const Record& record, uint32_t g, uint32_t count,
                  float* values) {
  if (has_grid(format)) return unpack_grid(format, record, g, values);
  const PanelLayout layout = panel_layout(format);
  const size_t group = layout.header_bytes + g * layout.group_bytes();
  const size_t words = group + layout.scale_bytes;
  const float factor = group_factor(format, record, group);
  const bool has_offset = is_affine(format);
  const float offset = has_offset ? group_offset(format, record, group) : 0.0f;
  for (uint32_t i = 0; i < count; ++i) {
    const float product = factor * group_code(format, record, words, i);
    // Adding zero makes a negative zero positive, as q6_k wants it.
    values[i] = has_offset                     ? product - offset
                : format == WeightFormat::kQ6K ? product + 0.0f
                                               : product;
  }
}

}  // namespace

void unpack_output(const PackedOutput& output, float* values) {
  if (is_float(output.format)) return unpack_floats(output, values);
  const PanelLayout layout = panel_layout(output.format);
  for (uint32_t k = 0; k < output.inputs; k += layout.group_inputs) {
    const Record record{
        output.panel + size_t{k} / layout.record_inputs * layout.record_bytes() * output.width,
        output.width, output.lane};
    unpack_group(output.format, record, k % layout.record_inputs / layout.group_inputs,
                 std::min(layout.group_inputs, output.inputs - k), values + k);
  }
}

void unpack_bf16_pairs(const PackedOutput& output, float* values) {
  const uint32_t whole = output.inputs / 2 * 2;
  for (uint32_t k = 0; k < output.inputs; ++k) {
    // A word has two inputs; an odd last input stands alone with 16 bits per output.
    const size_t at = k < whole ? size_t{output.width} * (k / 2 * 2) + 2 * output.lane + k % 2
                                : size_t{output.width} * k + output.lane;
    values[k] = bf16_to_f32(load<uint16_t>(output.panel + 2 * at));
  }
}

}  // namespace dflash::compute
