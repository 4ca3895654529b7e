// Packs quantised weights into panels (panel_layout.h). The record of an output is taken apart
// sixteen bytes at a time and stored for four outputs at a time (record_tiles.h), so that packing
// keeps up with reading. The formats made at load (int8_g32, int4_g32) are quantised from float
// rows.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "base/convert_kernels.h"
#include "compute/cpu/panels/pack.h"
#include "compute/cpu/panels/pack_grids.h"
#include "compute/cpu/panels/panel_layout.h"
#include "compute/cpu/panels/quantize_groups.h"
#include "compute/cpu/panels/record_tiles.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

uint16_t load16(const uint8_t* bytes) {
  uint16_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}
uint64_t load64(const uint8_t* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Returns the lowest bits of eight bytes as one byte: the product with 2^(56 - 7i) moves bit 8i to
// bit 56 + i, and the shift brings those eight bits down.
uint32_t gather_bits(uint64_t bytes) {
  return static_cast<uint32_t>((bytes & 0x0101010101010101ull) * 0x0102040810204080ull >> 56);
}

internal::U16x8 load_bytes(const uint8_t* bytes) {
  return internal::load_vector<internal::U16x8>(bytes);
}

// Makes four words of nibbles: two from those at bit `low_shift` of sixteen bytes, two from those
// at bit `high_shift` of sixteen others.
void put_nibbles(const uint8_t* low, int low_shift, const uint8_t* high, int high_shift,
                 uint32_t* words) {
  internal::store_vector(words, internal::even_bytes(join_nibbles(load_bytes(low), low_shift),
                                                     join_nibbles(load_bytes(high), high_shift)));
}

void put_q8_0(const uint8_t* block, RecordFields<WeightFormat::kQ8_0>& fields) {
  fields.scales[0] = load16(block);
  std::memcpy(fields.words, block + 2, 32);
}

// Unpacks the six-bit scales and minima of eight groups, which then alternate. The bits are those
// of internal::k_scale, but four groups are taken at a time in a word.
void put_k_scales(const uint8_t* packed, uint8_t* scales) {
  uint32_t low, middle, high;
  std::memcpy(&low, packed, sizeof(low));
  std::memcpy(&middle, packed + 4, sizeof(middle));
  std::memcpy(&high, packed + 8, sizeof(high));
  const uint32_t all[4] = {low & 0x3f3f3f3fu, (high & 0x0f0f0f0fu) | (low >> 6 & 0x03030303u) << 4,
                           middle & 0x3f3f3f3fu,
                           (high >> 4 & 0x0f0f0f0fu) | (middle >> 6 & 0x03030303u) << 4};
  uint8_t bytes[16];  // the eight scales, then the eight minima
  std::memcpy(bytes, all, sizeof(bytes));
  for (uint32_t group = 0; group < 8; ++group) {
    scales[2 * group] = bytes[group];
    scales[2 * group + 1] = bytes[8 + group];
  }
}

template <WeightFormat kFormat>
void put_k_affine(const uint8_t* block, RecordFields<kFormat>& fields) {
  constexpr bool kHasFifthBit = kFormat == WeightFormat::kQ5K;
  fields.headers[0] = load16(block);
  fields.headers[1] = load16(block + 2);
  put_k_scales(block + 4, fields.scales);
  const uint8_t* nibbles = block + (kHasFifthBit ? 48 : 16);
  for (uint32_t group = 0; group < 8; ++group) {
    const int shift = group % 2 == 0 ? 0 : 4;
    const uint8_t* from = nibbles + group / 2 * 32;
    put_nibbles(from, shift, from + 16, shift, fields.words + 4 * group);
    if constexpr (kHasFifthBit) {
      uint32_t fifth = 0;
      for (uint32_t word = 0; word < 4; ++word)
        fifth |= gather_bits(load64(block + 16 + 8 * word) >> group) << (8 * word);
      fields.further[group] = fifth;
    }
  }
}

// Unpacks a block of q6_k into 16 groups of 16 inputs. Group 8 * half + 2 * j + part (j < 4) has
// its nibbles at bit 4 * (j / 2) of 16 bytes, and its upper bit pairs at bit 2 * j of 16 others.
void put_q6_k(const uint8_t* block, RecordFields<WeightFormat::kQ6K>& fields) {
  fields.headers[0] = load16(block + 208);
  std::memcpy(fields.scales, block + 192, 16);
  for (uint32_t half = 0; half < 2; ++half) {
    for (uint32_t part = 0; part < 2; ++part) {
      const uint8_t* high = block + 128 + half * 32 + part * 16;
      for (uint32_t j = 0; j < 2; ++j) {
        const uint8_t* low = block + half * 64 + j * 32 + part * 16;
        // The upper nibbles of the same bytes belong to the group four further on.
        const uint32_t group = 8 * half + 2 * j + part;
        uint32_t words[4], pairs[4];
        put_nibbles(low, 0, low, 4, words);
        std::memcpy(fields.words + 2 * group, words, 8);
        std::memcpy(fields.words + 2 * (group + 4), words + 2, 8);
        const int shift = static_cast<int>(2 * j);
        internal::store_vector(pairs,
                               internal::even_bytes(join_pairs(load_bytes(high), shift),
                                                    join_pairs(load_bytes(high), shift + 4)));
        fields.further[group] = pairs[0] | pairs[1] << 4;
        fields.further[group + 4] = pairs[2] | pairs[3] << 4;
      }
    }
  }
}

void put_iq4_xs(const uint8_t* block, RecordFields<WeightFormat::kIq4Xs>& fields) {
  fields.headers[0] = load16(block);
  const uint32_t high = load16(block + 2);
  for (uint32_t group = 0; group < 8; ++group) {
    const uint32_t scale =
        (uint32_t{block[4 + group / 2]} >> (group % 2 * 4) & 15u) | (high >> (2 * group) & 3u) << 4;
    fields.scales[group] = static_cast<uint8_t>(scale - 32);
    const uint8_t* nibbles = block + 8 + 16 * group;
    put_nibbles(nibbles, 0, nibbles, 4, fields.words + 4 * group);
  }
}

// Makes the word of a group of q2_k or q3_k from bit pair `shift` of sixteen bytes.
uint32_t join_bit_pairs(const uint8_t* bytes, uint32_t shift) {
  const uint64_t low = load64(bytes) >> shift & 0x0303030303030303ull,
                 high = load64(bytes + 8) >> shift & 0x0303030303030303ull;
  const uint64_t both = low | high << 4;
  return static_cast<uint32_t>(both | both >> 30);
}

// Calls put(group, pairs, shift, part, bit) for the groups of a block of q2_k or q3_k: `pairs` are
// the 16 bytes with its bit pairs, at bit `shift`; the third bits are bits `bit` of half `part` of
// 32 bytes.
template <class Put>
void for_groups_of_16(const uint8_t* pairs, const Put& put) {
  for (uint32_t group = 0; group < 16; ++group) {
    const uint32_t bit = group / 2, part = group % 2;
    put(group, pairs + bit / 4 * 32 + part * 16, bit % 4 * 2, part, bit);
  }
}

void put_q3_k(const uint8_t* block, RecordFields<WeightFormat::kQ3K>& fields) {
  fields.headers[0] = load16(block + 108);
  for_groups_of_16(block + 32, [&](uint32_t group, const uint8_t* pairs, uint32_t shift,
                                   uint32_t part, uint32_t bit) {
    fields.words[group] = join_bit_pairs(pairs, shift);
    fields.scales[group] = static_cast<uint8_t>(internal::q3_k_scale(block + 96, group) - 32);
    const uint64_t low = load64(block + 16 * part) >> bit & 0x0101010101010101ull,
                   high = load64(block + 16 * part + 8) >> bit & 0x0101010101010101ull;
    const uint64_t both = low | high << 2;  // in each byte steps 0 and 2, or 1 and 3
    const uint64_t four = both | both >> 31;
    fields.further[group] = static_cast<uint16_t>(four | four >> 12);
  });
}

void put_q2_k(const uint8_t* block, RecordFields<WeightFormat::kQ2K>& fields) {
  fields.headers[0] = load16(block + 80);
  fields.headers[1] = load16(block + 82);
  std::memcpy(fields.scales, block, 16);
  for_groups_of_16(block + 16,
                   [&](uint32_t group, const uint8_t* pairs, uint32_t shift, uint32_t, uint32_t) {
                     fields.words[group] = join_bit_pairs(pairs, shift);
                   });
}

// Unpacks a block of q4_1, q5_0 or q5_1: its factors, the fifth bits, then the nibbles.
template <WeightFormat kFormat>
void put_q4_1_or_q5(const uint8_t* block, RecordFields<kFormat>& fields) {
  constexpr size_t kScales = RecordFields<kFormat>::kScales;
  std::memcpy(fields.scales, block, 2 * kScales);
  const uint8_t* nibbles = block + 2 * kScales;
  if constexpr (has_fifth_bit(kFormat)) {
    std::memcpy(fields.further, nibbles, 4);
    nibbles += 4;
  }
  put_nibbles(nibbles, 0, nibbles, 4, fields.words);
}

// The codes of a block already have the order of a panel's words.
void put_int4_zp(const uint8_t* block, RecordFields<WeightFormat::kInt4Zp>& fields) {
  std::memcpy(fields.scales, block, sizeof(fields.scales));
  std::memcpy(fields.words, block + 4, sizeof(fields.words));
}

template <WeightFormat kFormat>
void put_block(const uint8_t* block, RecordFields<kFormat>& fields) {
  if constexpr (kFormat == WeightFormat::kQ8_0)
    put_q8_0(block, fields);
  else if constexpr (kFormat == WeightFormat::kQ4K || kFormat == WeightFormat::kQ5K)
    put_k_affine(block, fields);
  else if constexpr (kFormat == WeightFormat::kQ6K)
    put_q6_k(block, fields);
  else if constexpr (kFormat == WeightFormat::kIq4Xs)
    put_iq4_xs(block, fields);
  else if constexpr (kFormat == WeightFormat::kQ3K)
    put_q3_k(block, fields);
  else if constexpr (kFormat == WeightFormat::kQ2K)
    put_q2_k(block, fields);
  else if constexpr (kFormat == WeightFormat::kQ4_1 || kFormat == WeightFormat::kQ5_0 ||
                     kFormat == WeightFormat::kQ5_1)
    put_q4_1_or_q5(block, fields);
  else if constexpr (has_grid(kFormat))
    put_grid<kFormat>(block, fields);
  else if constexpr (kFormat == WeightFormat::kInt4Zp)
    put_int4_zp(block, fields);
  else {  // q4_0, iq4_nl and gguf_mxfp4: a scale, then the low nibbles before the high ones
    constexpr bool kIsMxfp4 = kFormat == WeightFormat::kGgufMxfp4;
    fields.scales[0] = static_cast<ScaleOf<kFormat>>(kIsMxfp4 ? block[0] : load16(block));
    const uint8_t* nibbles = block + (kIsMxfp4 ? 1 : 2);
    put_nibbles(nibbles, 0, nibbles, 4, fields.words);
  }
}

// The outputs of a matrix that one panel takes.
struct PanelSource {
  const MatrixView& matrix;
  uint32_t first_output;
  uint32_t num_outputs;
  uint32_t width;
};

// Quantises rows on their way into a panel. Four rows are widened and quantised, then stored; zeros
// fill up the last group of each.
template <WeightFormat kFormat>
void pack_from_floats(const PanelSource& source, std::byte* packed) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  constexpr bool kIsInt8 = kFormat == WeightFormat::kInt8G32;
  const uint32_t num_records = (source.matrix.inputs + kGroupInputs - 1) / kGroupInputs;
  const size_t padded = size_t{num_records} * kGroupInputs;
  std::vector<float> row(padded, 0.0f), scales(kQuad * num_records);
  std::vector<int8_t> integers(kQuad * padded);
  for (uint32_t first = 0; first < source.num_outputs; first += kQuad) {
    const uint32_t count = std::min(kQuad, source.num_outputs - first);
    for (uint32_t o = 0; o < count; ++o) {
      dequantize(source.matrix, source.first_output + first + o, 1, row.data());
      quantize_groups(row.data(), num_records, kIsInt8 ? 127.0f : 7.0f,
                      integers.data() + o * padded, scales.data() + o * num_records);
    }
    for (uint32_t record = 0; record < num_records; ++record) {
      RecordFields<kFormat> fields[kQuad] = {};
      for (uint32_t o = 0; o < count; ++o) {
        std::memcpy(fields[o].scales, &scales[o * num_records + record], sizeof(float));
        const int8_t* from = integers.data() + o * padded + size_t{record} * kGroupInputs;
        if constexpr (kIsInt8) {
          std::memcpy(fields[o].words, from, kGroupInputs);
        } else {
          uint8_t codes[kGroupInputs];
          for (uint32_t i = 0; i < kGroupInputs; ++i) codes[i] = static_cast<uint8_t>(from[i] + 8);
          put_nibbles(codes, 0, codes + 16, 0, fields[o].words);
        }
      }
      store_records(fields, source.width, first,
                    packed + record * kLayout.record_bytes() * source.width);
    }
  }
}

// These codes stand for the row of a lane past the last output.
constexpr uint8_t kNoCodes[kFp8BlockWidth] = {};

// Packs FP8: the codes go from the rows of four outputs straight into the panel.
void pack_fp8(const PanelSource& source, std::byte* packed) {
  constexpr PanelLayout kLayout = panel_layout(WeightFormat::kFp8E4m3B128);
  const MatrixView& matrix = source.matrix;
  for (uint32_t k = 0; k < matrix.inputs;
       k += kLayout.record_inputs, packed += kLayout.record_bytes() * source.width) {
    for (uint32_t first = 0; first < source.num_outputs; first += kQuad) {
      const uint8_t* rows[kQuad];
      uint32_t scales[kQuad];
      for (uint32_t o = 0; o < kQuad; ++o) {
        rows[o] = kNoCodes;
        scales[o] = 0;
        if (first + o >= source.num_outputs) continue;
        const uint32_t output = source.first_output + first + o;
        rows[o] = reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride) + k;
        std::memcpy(&scales[o],
                    matrix.scales + output / outputs_per_scale(matrix) * matrix.scales_stride +
                        size_t{k} / kFp8BlockWidth * 4,
                    4);
      }
      store_quad(packed + size_t{4} * first, std::min(kQuad, source.width - first), scales[0],
                 scales[1], scales[2], scales[3]);
      store_bytes(rows, std::min(kLayout.record_inputs, matrix.inputs - k), source.width, first,
                  packed + size_t{kLayout.scale_bytes} * source.width);
    }
  }
}

template <WeightFormat kFormat>
void pack_records(const PanelSource& source, std::byte* packed) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  const MatrixView& matrix = source.matrix;
  const FormatFacts& facts = format_facts(kFormat);
  for (uint32_t k = 0; k < matrix.inputs;
       k += kLayout.record_inputs, packed += kLayout.record_bytes() * source.width) {
    for (uint32_t first = 0; first < source.num_outputs; first += kQuad) {
      RecordFields<kFormat> fields[kQuad];
      const uint32_t count = std::min(kQuad, source.num_outputs - first);
      if (count < kQuad) std::memset(static_cast<void*>(fields), 0, sizeof(fields));
      for (uint32_t o = 0; o < count; ++o) {
        const uint32_t output = source.first_output + first + o;
        const auto* row =
            reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride);
        // The pairs of nibbles in an mxfp4 file already have the order of a word.
        if constexpr (kFormat == WeightFormat::kMxfp4) {
          fields[o].scales[0] =
              static_cast<uint8_t>(matrix.scales[output * matrix.scales_stride + k / kGroupInputs]);
          std::memcpy(fields[o].words, row + k / 2, 16);
        } else {
          put_block<kFormat>(row + size_t{k} / facts.block * facts.block_bytes, fields[o]);
        }
      }
      store_records(fields, source.width, first, packed);
    }
  }
}

using PackFunction = void (*)(const PanelSource& source, std::byte* packed);
constexpr PackFunction kPack[kNumWeightFormats] = {
    nullptr,  // float formats are packed by pack.cc
    nullptr,
    nullptr,
    pack_from_floats<WeightFormat::kInt8G32>,
    pack_from_floats<WeightFormat::kInt4G32>,
    pack_fp8,
    pack_records<WeightFormat::kMxfp4>,
    pack_records<WeightFormat::kQ8_0>,
    pack_records<WeightFormat::kQ4_0>,
    pack_records<WeightFormat::kQ4K>,
    pack_records<WeightFormat::kQ5K>,
    pack_records<WeightFormat::kQ6K>,
    pack_records<WeightFormat::kGgufMxfp4>,
    pack_records<WeightFormat::kIq4Nl>,
    pack_records<WeightFormat::kIq4Xs>,
    pack_records<WeightFormat::kQ4_1>,
    pack_records<WeightFormat::kQ5_0>,
    pack_records<WeightFormat::kQ5_1>,
    pack_records<WeightFormat::kIq3Xxs>,
    pack_records<WeightFormat::kIq3S>,
    pack_records<WeightFormat::kIq2Xxs>,
    pack_records<WeightFormat::kIq2Xs>,
    pack_records<WeightFormat::kIq2S>,
    nullptr,  // the formats without panels
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    pack_records<WeightFormat::kQ3K>,
    pack_records<WeightFormat::kQ2K>,
    pack_records<WeightFormat::kInt4Zp>,
};

}  // namespace

size_t quantized_panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width) {
  const PanelLayout layout = panel_layout(format);
  return (size_t{inputs} + layout.record_inputs - 1) / layout.record_inputs *
         layout.record_bytes() * width;
}

void pack_quantized_panel(const MatrixView& matrix, WeightFormat format, uint32_t first_output,
                          uint32_t width, std::byte* packed) {
  const uint32_t num_outputs = std::min(width, matrix.outputs - first_output);
  // Lanes past the last output and codes past the last input must not keep what an earlier load
  // left in this memory. Their products are never used.
  if (num_outputs < width || matrix.inputs % panel_layout(format).record_inputs != 0) {
    std::memset(packed, 0, quantized_panel_bytes(format, matrix.inputs, width));
  }
  kPack[static_cast<uint8_t>(format)]({matrix, first_output, num_outputs, width}, packed);
}

// With the widest loop that this processor can run.
void quantize_groups(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                     float* scales) {
#if defined(__x86_64__)
  if (dflash::internal::has_avx512())
    return internal::quantize_groups_avx512(values, num_groups, limit, integers, scales);
  if (dflash::internal::has_avx2_f16c())
    return internal::quantize_groups_avx2(values, num_groups, limit, integers, scales);
#endif
  for (uint32_t group = 0; group < num_groups; ++group) {
    const size_t at = size_t{group} * kGroupInputs;
    scales[group] = quantize_group(values + at, limit, integers + at);
  }
}

}  // namespace dflash::compute
