// Packs panels for devices, a row at a time: the row becomes records in the resident format, and
// the units of 32 records are interleaved.
// SPDX-License-Identifier: Apache-2.0
#include "cards/pack_records.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "compute/formats/dequantize.h"
#include "compute/formats/plain_rows.h"

namespace dflash::compute::gpu {
namespace {

constexpr uint32_t kGroups = kChain / kGroupInputs;  // groups of 32 inputs in a record

// The bytes of one output as the checkpoint stores them.
struct StoredRow {
  const uint8_t* values;
  const uint8_t* scales;  // null: the format keeps none apart
};

StoredRow stored_row(const MatrixView& matrix, uint32_t output) {
  StoredRow row{reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride),
                nullptr};
  if (matrix.scales != nullptr) {
    const uint32_t scale_row = output / outputs_per_scale(matrix);
    row.scales = reinterpret_cast<const uint8_t*>(matrix.scales + scale_row * matrix.scales_stride);
  }
  return row;
}

// Packs blocks of 32 inputs, which are `head` bytes of scale and then the codes: in a record all
// scales lie behind all codes.
void split_blocks(const uint8_t* blocks, uint32_t num_blocks, uint32_t head, uint32_t codes,
                  uint8_t* record) {
  for (uint32_t i = 0; i < num_blocks; ++i, blocks += head + codes) {
    std::memcpy(record + i * codes, blocks + head, codes);
    std::memcpy(record + kGroups * codes + i * head, blocks, head);
  }
}

// Packs blocks of q4_1, q5_0 and q5_1, in which the factors (`head` bytes) and the fifth bits lie
// before the nibbles.
void split_affine_blocks(const uint8_t* blocks, uint32_t num_blocks, uint32_t head, uint32_t fifth,
                         uint8_t* record) {
  for (uint32_t i = 0; i < num_blocks; ++i, blocks += head + fifth + 16) {
    std::memcpy(record + 16 * i, blocks + head + fifth, 16);
    std::memcpy(record + kGroups * 16 + i * fifth, blocks + head, fifth);
    std::memcpy(record + kGroups * (16 + fifth) + i * head, blocks, head);
  }
}

// Makes of the bytes of mxfp4 and int4_zp, which hold inputs 2i and 2i + 1, bytes that hold inputs
// i and 16 + i.
void split_pairs(const uint8_t* pairs, uint8_t* split) {
  const auto code = [pairs](uint32_t input) { return pairs[input / 2] >> (input % 2 * 4) & 15; };
  for (uint32_t i = 0; i < 16; ++i) split[i] = static_cast<uint8_t>(code(i) | code(16 + i) << 4);
}

// Writes the record of inputs [begin, begin + count) of a row in a format that is kept as stored.
void put_stored(WeightFormat format, const StoredRow& row, uint32_t begin, uint32_t count,
                uint8_t* record) {
  const FormatFacts& facts = format_facts(format);
  const uint8_t* blocks = row.values + size_t{begin} / facts.block * facts.block_bytes;
  const uint32_t num_groups = (count + kGroupInputs - 1) / kGroupInputs;
  switch (format) {
    case WeightFormat::kQ8_0:      return split_blocks(blocks, num_groups, 2, 32, record);
    case WeightFormat::kQ4_0:
    case WeightFormat::kIq4Nl:     return split_blocks(blocks, num_groups, 2, 16, record);
    case WeightFormat::kGgufMxfp4: return split_blocks(blocks, num_groups, 1, 16, record);
    case WeightFormat::kQ4_1:      return split_affine_blocks(blocks, num_groups, 4, 0, record);
    case WeightFormat::kQ5_0:      return split_affine_blocks(blocks, num_groups, 2, 4, record);
    case WeightFormat::kQ5_1:      return split_affine_blocks(blocks, num_groups, 4, 4, record);
    case WeightFormat::kIq4Xs:
      std::memcpy(record, blocks + 8, 128);
      std::memcpy(record + 128, blocks, 8);
      return;
    case WeightFormat::kInt4Zp:
      for (uint32_t group = 0; group < num_groups; ++group, blocks += facts.block_bytes) {
        split_pairs(blocks + 4, record + 16 * group);
        std::memcpy(record + kChain / 2 + 4 * group, blocks, 4);
      }
      return;
    case WeightFormat::kMxfp4:
      for (uint32_t group = 0; group < num_groups; ++group)
        split_pairs(row.values + begin / 2 + 16 * group, record + 16 * group);
      std::memcpy(record + kChain / 2, row.scales + begin / kGroupInputs, num_groups);
      return;
    case WeightFormat::kFp8E4m3B128:
      std::memcpy(record, row.values + begin, count);
      std::memcpy(record + kChain, row.scales + begin / kFp8BlockWidth * sizeof(float),
                  (count + kFp8BlockWidth - 1) / kFp8BlockWidth * sizeof(float));
      return;
    default: std::memcpy(record, blocks, facts.block_bytes);  // q4_k q5_k q6_k: ggml's block
  }
}

// Writes a record of int8_g32 or int4_g32 from float32 values.
void put_quantized(WeightFormat format, const float* values, uint32_t count, uint8_t* record) {
  const bool is_int8 = format == WeightFormat::kInt8G32;
  for (uint32_t group = 0; group * kGroupInputs < count; ++group) {
    const uint32_t size = std::min(kGroupInputs, count - group * kGroupInputs);
    float padded[kGroupInputs] = {};
    int8_t integers[kGroupInputs];
    std::copy_n(values + group * kGroupInputs, size, padded);
    const float scale = quantize_group(padded, is_int8 ? 127.0f : 7.0f, integers);
    uint8_t* codes = record + group * (is_int8 ? 32 : 16);
    if (is_int8) std::memcpy(codes, integers, sizeof(integers));
    for (uint32_t i = 0; !is_int8 && i < 16; ++i)
      codes[i] = static_cast<uint8_t>((integers[i] + 8) | (integers[16 + i] + 8) << 4);
    std::memcpy(record + kGroups * (is_int8 ? 32 : 16) + group * sizeof(float), &scale,
                sizeof(scale));
  }
}

// Writes a record of a float format that is kept as stored; the matrix may have strides.
void put_floats(const MatrixView& matrix, uint32_t output, uint32_t begin, uint32_t count,
                uint8_t* record) {
  const auto element = static_cast<int64_t>(dtype_bytes(dtype_of(matrix.format)));
  const std::byte* from =
      matrix.data + (output * matrix.output_stride + begin * matrix.input_stride) * element;
  if (matrix.input_stride == 1) {
    std::memcpy(record, from, count * static_cast<size_t>(element));
    return;
  }
  for (uint32_t i = 0; i < count; ++i) {
    std::memcpy(record + i * static_cast<size_t>(element), from + i * matrix.input_stride * element,
                static_cast<size_t>(element));
  }
}

}  // namespace

void pack_panel(const MatrixView& matrix, WeightFormat resident, uint32_t panel,
                std::byte* packed) {
  const uint32_t units = record_units(resident), first = panel * kPanelWidth;
  const uint32_t outputs = std::min(kPanelWidth, matrix.outputs - first);
  const bool is_made = resident != matrix.format;  // made from dequantised values
  std::memset(packed, 0, panel_bytes(resident, matrix.inputs));
  std::vector<float> values(is_made ? matrix.inputs : 0);
  std::vector<uint8_t> record(size_t{units} * kUnitBytes);
  for (uint32_t o = 0; o < outputs; ++o) {
    if (is_made) dequantize(matrix, first + o, 1, values.data());
    for (uint32_t chain = 0; chain < num_chains(matrix.inputs); ++chain) {
      const uint32_t begin = chain * kChain, count = std::min(kChain, matrix.inputs - begin);
      std::fill(record.begin(), record.end(), uint8_t{0});
      if (!is_made && is_float(resident))
        put_floats(matrix, first + o, begin, count, record.data());
      else if (!is_made)
        put_stored(resident, stored_row(matrix, first + o), begin, count, record.data());
      else if (resident == WeightFormat::kF32)
        std::memcpy(record.data(), values.data() + begin, count * sizeof(float));
      else
        put_quantized(resident, values.data() + begin, count, record.data());
      std::byte* to = packed + chain * chain_bytes(resident) + o * kUnitBytes;
      for (uint32_t u = 0; u < units; ++u)
        std::memcpy(to + size_t{u} * kUnitBytes * kPanelWidth, record.data() + u * kUnitBytes,
                    kUnitBytes);
    }
  }
}

}  // namespace dflash::compute::gpu
