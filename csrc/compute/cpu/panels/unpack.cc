// Takes one lane of a panel apart. Each format's formula is that of dequantize.h, written once more
// for the order of a panel: what lies behind it is a gather of scalars, bound by its cache misses.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/panels/unpack.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "compute/cpu/panels/pack.h"
#include "compute/cpu/panels/panel_layout.h"
#include "compute/formats/dequantize.h"

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
    case WeightFormat::kQ6K:
    case WeightFormat::kIq4Xs:
      return record.f16(0) * static_cast<float>(record.field<int8_t>(group));
    default: return record.f16(group);
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
    case WeightFormat::kQ4K:         return static_cast<float>(nibble(record, words, i));
    case WeightFormat::kQ5K:         {
      const uint32_t fifth = record.field<uint32_t>(words, 4) >> i & 1u;
      return static_cast<float>(nibble(record, words, i) | fifth << 4);
    }
    case WeightFormat::kQ6K: {
      const uint32_t shift = i % 8 / 2 * 8 + i / 8 * 4 + i % 2 * 2;
      const uint32_t upper = record.field<uint32_t>(words, 2) >> shift & 3u;
      return static_cast<float>(static_cast<int32_t>(nibble(record, words, i) | upper << 4) - 32);
    }
    default: return static_cast<float>(static_cast<int32_t>(nibble(record, words, i)) - 8);
  }
}

void unpack_group(WeightFormat format, const Record& record, uint32_t g, uint32_t count,
                  float* values) {
  const PanelLayout layout = panel_layout(format);
  const size_t group = layout.header_bytes + g * layout.group_bytes();
  const size_t words = group + layout.scale_bytes;
  const float factor = group_factor(format, record, group);
  const bool is_affine = format == WeightFormat::kQ4K || format == WeightFormat::kQ5K;
  const float offset =
      is_affine ? record.f16(2) * static_cast<float>(record.field<uint8_t>(group + 1)) : 0.0f;
  for (uint32_t i = 0; i < count; ++i) {
    const float product = factor * group_code(format, record, words, i);
    // Adding zero makes a negative zero positive, as q6_k wants it.
    values[i] = is_affine                      ? product - offset
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
