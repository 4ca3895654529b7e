// Quantised weights into panels (panel_layout.h): nibbles and bit fields are gathered eight at a time from 64-bit words, so that packing
// keeps up with reading. Quantisation at load (int8_g32, int4_g32) works on float rows.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <vector>

#include "compute/cpu/pack.h"
#include "compute/cpu/panel_layout.h"
#include "compute/dequantize.h"

namespace dflash::compute {
namespace {

uint64_t load64(const uint8_t* bytes) {
  uint64_t value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// The low nibbles of eight bytes as one word, first byte lowest.
uint32_t gather_nibbles(uint64_t bytes) {
  bytes &= 0x0f0f0f0f0f0f0f0full;
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffull;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffull;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}
// The lowest bit pairs of eight bytes: those of bytes 2b and 2b + 1 as the low nibble of byte b.
uint32_t gather_pairs(uint64_t bytes) {
  bytes &= 0x0303030303030303ull;
  bytes = (bytes | bytes >> 6) & 0x000f000f000f000full;
  bytes = (bytes | bytes >> 8) & 0x00000f0f00000f0full;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}
// The lowest bits of eight bytes: each multiple of 2^(56 - 7i) moves bit 8i to bit 56 + i.
uint32_t gather_bits(uint64_t bytes) {
  return static_cast<uint32_t>((bytes & 0x0101010101010101ull) * 0x0102040810204080ull >> 56);
}

// One output's lane of one record. The layout is a constant: stores of bytes could otherwise change it in the compiler's eyes.
template <WeightFormat kFormat>
class Lane {
 public:
  static constexpr PanelLayout kLayout = panel_layout(kFormat);
  Lane(std::byte* record, uint32_t width, uint32_t output) : record_(record), width_(width), output_(output) {}

  void put_header(uint32_t field, uint16_t value) const { put(size_t{field} * sizeof(value) * width_, value); }
  template <class T>
  void put_scale(uint32_t group, uint32_t field, T value) const {
    put(group_at(group) + size_t{field} * sizeof(T) * width_, value);
  }
  void put_word(uint32_t group, uint32_t word, uint32_t value) const {
    put(group_at(group) + (size_t{kLayout.scale_bytes} + size_t{word} * sizeof(value)) * width_, value);
  }
  void put_byte(uint32_t group, uint32_t input, uint8_t value) const { put(group_at(group) + (size_t{kLayout.scale_bytes} + input) * width_, value); }

 private:
  size_t group_at(uint32_t group) const { return (kLayout.header_bytes + group * kLayout.group_bytes()) * width_; }
  // `field_at` is where the field's array over the outputs begins.
  template <class T>
  void put(size_t field_at, T value) const {
    std::memcpy(record_ + field_at + sizeof(T) * output_, &value, sizeof(T));
  }

  std::byte* record_;
  uint32_t width_;
  uint32_t output_;
};

// Blocks of 32 whose nibbles are low halves first (q4_0, iq4_nl, mxfp4 of GGUF).
template <class L>
void put_split_nibbles(L lane, uint32_t group, const uint8_t* nibbles) {
  for (uint32_t half = 0; half < 2; ++half) {
    const uint64_t bytes = load64(nibbles + 8 * half);
    lane.put_word(group, half, gather_nibbles(bytes));
    lane.put_word(group, 2 + half, gather_nibbles(bytes >> 4));
  }
}

template <class L>
void put_q8_0(L lane, const uint8_t* block) {
  lane.put_scale(0, 0, internal::load_u16(block));
  for (uint32_t word = 0; word < 8; ++word) {
    uint32_t value;
    std::memcpy(&value, block + 2 + 4 * word, sizeof(value));
    lane.put_word(0, word, value);
  }
}

template <class L>
void put_k_affine(L lane, bool has_fifth_bit, const uint8_t* block) {
  lane.put_header(0, internal::load_u16(block));
  lane.put_header(1, internal::load_u16(block + 2));
  const uint8_t* nibbles = block + (has_fifth_bit ? 48 : 16);
  for (uint32_t group = 0; group < 8; ++group) {
    uint8_t scale, minimum;
    internal::k_scale(block + 4, group, &scale, &minimum);
    lane.put_scale(group, 0, scale);
    lane.put_scale(group, 1, minimum);
    uint32_t fifth = 0;
    for (uint32_t word = 0; word < 4; ++word) {
      lane.put_word(group, word, gather_nibbles(load64(nibbles + group / 2 * 32 + 8 * word) >> (group % 2 * 4)));
      if (has_fifth_bit) fifth |= gather_bits(load64(block + 16 + 8 * word) >> group) << (8 * word);
    }
    if (has_fifth_bit) lane.put_word(group, 4, fifth);
  }
}

template <class L>
void put_q6_k(L lane, const uint8_t* block) {
  lane.put_header(0, internal::load_u16(block + 208));
  for (uint32_t group = 0; group < 16; ++group) {
    const uint32_t half = group / 8, j = group % 8 / 2, first = group % 2 * 16;  // as dequantize_q6_k, with i from `first`
    const uint8_t* low = block + half * 64 + j % 2 * 32 + first;
    const uint8_t* high = block + 128 + half * 32 + first;
    lane.put_scale(group, 0, block[192 + group]);
    uint32_t upper = 0;
    for (uint32_t word = 0; word < 2; ++word) {
      lane.put_word(group, word, gather_nibbles(load64(low + 8 * word) >> (j / 2 * 4)));
      upper |= gather_pairs(load64(high + 8 * word) >> (2 * j)) << (4 * word);
    }
    lane.put_word(group, 2, upper);
  }
}

template <class L>
void put_iq4_xs(L lane, const uint8_t* block) {
  lane.put_header(0, internal::load_u16(block));
  const uint32_t high = internal::load_u16(block + 2);
  for (uint32_t group = 0; group < 8; ++group) {
    const uint32_t scale = (uint32_t{block[4 + group / 2]} >> (group % 2 * 4) & 15u) | (high >> (2 * group) & 3u) << 4;
    lane.put_scale(group, 0, static_cast<int8_t>(static_cast<int32_t>(scale) - 32));
    put_split_nibbles(lane, group, block + 8 + 16 * group);
  }
}

template <WeightFormat kFormat>
void put_block(Lane<kFormat> lane, const uint8_t* block) {
  if constexpr (kFormat == WeightFormat::kQ8_0) put_q8_0(lane, block);
  else if constexpr (kFormat == WeightFormat::kQ4K || kFormat == WeightFormat::kQ5K) put_k_affine(lane, kFormat == WeightFormat::kQ5K, block);
  else if constexpr (kFormat == WeightFormat::kQ6K) put_q6_k(lane, block);
  else if constexpr (kFormat == WeightFormat::kIq4Xs) put_iq4_xs(lane, block);
  else if constexpr (kFormat == WeightFormat::kGgufMxfp4) {
    lane.put_scale(0, 0, block[0]);
    put_split_nibbles(lane, 0, block + 1);
  } else {  // q4_0, iq4_nl
    lane.put_scale(0, 0, internal::load_u16(block));
    put_split_nibbles(lane, 0, block + 2);
  }
}

template <class L>
void put_mxfp4(L lane, const uint8_t* pairs, std::byte exponent) {
  lane.put_scale(0, 0, exponent);
  for (uint32_t word = 0; word < 4; ++word) {  // pairs are already in the order of a word
    uint32_t value;
    std::memcpy(&value, pairs + 4 * word, sizeof(value));
    lane.put_word(0, word, value);
  }
}

template <class L>
void put_fp8(L lane, const uint8_t* codes, uint32_t count, const std::byte* scale) {
  float value;
  std::memcpy(&value, scale, sizeof(value));
  lane.put_scale(0, 0, value);
  for (uint32_t i = 0; i < count; ++i) lane.put_byte(0, i, codes[i]);
}

template <class L>
void put_quantized(L lane, bool is_int8, const float* values) {
  int8_t integers[kGroupInputs];
  lane.put_scale(0, 0, quantize_group(values, is_int8 ? 127.0f : 7.0f, integers));
  if (is_int8) {
    for (uint32_t word = 0; word < 8; ++word) {
      uint32_t value;
      std::memcpy(&value, integers + 4 * word, sizeof(value));
      lane.put_word(0, word, value);
    }
    return;
  }
  uint8_t codes[kGroupInputs];
  for (uint32_t i = 0; i < kGroupInputs; ++i) codes[i] = static_cast<uint8_t>(integers[i] + 8);
  for (uint32_t word = 0; word < 4; ++word) lane.put_word(0, word, gather_nibbles(load64(codes + 8 * word)));
}

// What a panel takes of a matrix.
struct PanelSource {
  const MatrixView& matrix;
  uint32_t first_output;
  uint32_t num_outputs;
  uint32_t width;
};

// Rows quantised on the way: a row is widened, then cut into groups, the last one filled up with zeros.
template <WeightFormat kFormat>
void pack_from_floats(const PanelSource& source, std::byte* packed) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  const uint32_t num_records = (source.matrix.inputs + kLayout.record_inputs - 1) / kLayout.record_inputs;
  std::vector<float> row(size_t{num_records} * kLayout.record_inputs, 0.0f);
  for (uint32_t o = 0; o < source.num_outputs; ++o) {
    dequantize(source.matrix, source.first_output + o, 1, row.data());
    for (uint32_t record = 0; record < num_records; ++record) {
      const Lane<kFormat> lane(packed + record * kLayout.record_bytes() * source.width, source.width, o);
      put_quantized(lane, kFormat == WeightFormat::kInt8G32, row.data() + size_t{record} * kLayout.record_inputs);
    }
  }
}

template <WeightFormat kFormat>
void pack_records(const PanelSource& source, std::byte* packed) {
  constexpr PanelLayout kLayout = panel_layout(kFormat);
  const MatrixView& matrix = source.matrix;
  for (uint32_t k = 0; k < matrix.inputs; k += kLayout.record_inputs, packed += kLayout.record_bytes() * source.width) {
    for (uint32_t o = 0; o < source.num_outputs; ++o) {
      const uint32_t output = source.first_output + o;
      const auto* row = reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride);
      const Lane<kFormat> lane(packed, source.width, o);
      if constexpr (kFormat == WeightFormat::kMxfp4) {
        put_mxfp4(lane, row + k / 2, matrix.scales[output * matrix.scales_stride + k / kGroupInputs]);
      } else if constexpr (kFormat == WeightFormat::kFp8E4m3B128) {
        const std::byte* scale = matrix.scales + output / kFp8BlockWidth * matrix.scales_stride + size_t{k} / kFp8BlockWidth * sizeof(float);
        put_fp8(lane, row + k, std::min(kLayout.record_inputs, matrix.inputs - k), scale);
      } else {
        const FormatFacts& facts = format_facts(kFormat);
        put_block<kFormat>(lane, row + size_t{k} / facts.block * facts.block_bytes);
      }
    }
  }
}

using PackFunction = void (*)(const PanelSource& source, std::byte* packed);
constexpr PackFunction kPack[kNumWeightFormats] = {
    nullptr,  // floats are packed by pack.cc
    nullptr,
    nullptr,
    pack_from_floats<WeightFormat::kInt8G32>,
    pack_from_floats<WeightFormat::kInt4G32>,
    pack_records<WeightFormat::kFp8E4m3B128>,
    pack_records<WeightFormat::kMxfp4>,
    pack_records<WeightFormat::kQ8_0>,
    pack_records<WeightFormat::kQ4_0>,
    pack_records<WeightFormat::kQ4K>,
    pack_records<WeightFormat::kQ5K>,
    pack_records<WeightFormat::kQ6K>,
    pack_records<WeightFormat::kGgufMxfp4>,
    pack_records<WeightFormat::kIq4Nl>,
    pack_records<WeightFormat::kIq4Xs>,
};

}  // namespace

size_t quantized_panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width) {
  const PanelLayout layout = panel_layout(format);
  return (size_t{inputs} + layout.record_inputs - 1) / layout.record_inputs * layout.record_bytes() * width;
}

void pack_quantized_panel(const MatrixView& matrix, WeightFormat format, uint32_t first_output, uint32_t width, std::byte* packed) {
  const uint32_t num_outputs = std::min(width, matrix.outputs - first_output);
  // Lanes past the last output and codes past the last input must not be what an earlier load left; nobody uses their products.
  if (num_outputs < width || matrix.inputs % panel_layout(format).record_inputs != 0) {
    std::memset(packed, 0, quantized_panel_bytes(format, matrix.inputs, width));
  }
  kPack[static_cast<uint8_t>(format)]({matrix, first_output, num_outputs, width}, packed);
}

}  // namespace dflash::compute
