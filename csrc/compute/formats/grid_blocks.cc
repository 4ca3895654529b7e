// Takes apart and dequantises GGUF's blocks with grids as ggml defines them, one value at a time.
//
//   iq3_xxs  d, 64 bytes of indices, 8 words: seven signs per octet, and a scale in the top bits
//   iq3_s    d, 64 bytes of indices, 8 of ninth bits, 32 of signs, 4 of scales
//   iq2_xxs  d, then per 32 inputs 4 bytes of indices and a word as iq3_xxs has it
//   iq2_xs   d, 32 u16: nine bits of index and seven signs; 8 bytes of scales
//   iq2_s    d, 32 bytes of indices, 32 of signs, 8 of ninth and tenth bits, 8 of scales
// SPDX-License-Identifier: Apache-2.0
#include <bit>
#include <cstring>

#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute::internal {
namespace {

uint32_t load_u32(const uint8_t* bytes) {
  return uint32_t{load_u16(bytes)} | uint32_t{load_u16(bytes + 2)} << 16;
}

// Where seven signs are stored, the eighth makes the number of negative inputs even.
uint8_t eight_signs(uint32_t seven) {
  return static_cast<uint8_t>(seven | (static_cast<uint32_t>(std::popcount(seven)) & 1u) << 7);
}

// Takes the word of 32 inputs of iq3_xxs and iq2_xxs.
void open_word(uint32_t word, uint32_t group, GridBlock& to) {
  for (uint32_t octet = 0; octet < 4; ++octet)
    to.signs[4 * group + octet] = eight_signs(word >> (7 * octet) & 127u);
  to.scales[2 * group] = to.scales[2 * group + 1] = static_cast<uint8_t>(word >> 28);
}

void open_iq3_xxs(const uint8_t* block, GridBlock& to) {
  for (uint32_t i = 0; i < 64; ++i) to.indices[i] = block[2 + i];
  for (uint32_t group = 0; group < 8; ++group)
    open_word(load_u32(block + 66 + 4 * group), group, to);
}

void open_iq3_s(const uint8_t* block, GridBlock& to) {
  for (uint32_t i = 0; i < 64; ++i) {
    const uint32_t ninth = uint32_t{block[66 + i / 8]} >> (i % 8) & 1u;
    to.indices[i] = static_cast<uint16_t>(block[2 + i] | ninth << 8);
  }
  std::memcpy(to.signs, block + 74, 32);
  for (uint32_t i = 0; i < 16; ++i)
    to.scales[i] = static_cast<uint8_t>(block[106 + i / 4] >> (i / 2 % 2 * 4) & 15);
}

void open_iq2_xxs(const uint8_t* block, GridBlock& to) {
  for (uint32_t group = 0; group < 8; ++group) {
    const uint8_t* from = block + 2 + 8 * group;
    for (uint32_t i = 0; i < 4; ++i) to.indices[4 * group + i] = from[i];
    open_word(load_u32(from + 4), group, to);
  }
}

void put_scales(const uint8_t* packed, GridBlock& to) {
  for (uint32_t i = 0; i < 16; ++i)
    to.scales[i] = static_cast<uint8_t>(packed[i / 2] >> (i % 2 * 4) & 15);
}

void open_iq2_xs(const uint8_t* block, GridBlock& to) {
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t both = load_u16(block + 2 + 2 * i);
    to.indices[i] = static_cast<uint16_t>(both & 511u);
    to.signs[i] = eight_signs(both >> 9);
  }
  put_scales(block + 66, to);
}

void open_iq2_s(const uint8_t* block, GridBlock& to) {
  for (uint32_t i = 0; i < 32; ++i) {
    const uint32_t upper = uint32_t{block[66 + i / 4]} >> (i % 4 * 2) & 3u;
    to.indices[i] = static_cast<uint16_t>(block[2 + i] | upper << 8);
  }
  std::memcpy(to.signs, block + 34, 32);
  put_scales(block + 74, to);
}

}  // namespace

GridBlock open_grid_block(WeightFormat format, const uint8_t* block) {
  GridBlock found{};
  found.d = load_u16(block);
  switch (format) {
    case WeightFormat::kIq3Xxs: open_iq3_xxs(block, found); break;
    case WeightFormat::kIq3S:   open_iq3_s(block, found); break;
    case WeightFormat::kIq2Xxs: open_iq2_xxs(block, found); break;
    case WeightFormat::kIq2Xs:  open_iq2_xs(block, found); break;
    default:                    open_iq2_s(block, found); break;
  }
  return found;
}

uint8_t grid_magnitude(WeightFormat format, const GridBlock& block, uint32_t input) {
  const GridFacts grid = grid_facts(format);
  const uint32_t entry = block.indices[input / (4 * grid.entry_words)];
  const uint32_t word =
      kGridTable.words[grid.first_word + entry * grid.entry_words + input / 4 % grid.entry_words];
  return static_cast<uint8_t>(word >> (8 * (input % 4)));
}

float grid_factor(WeightFormat format, const GridBlock& block, uint32_t sixteen) {
  const float d = f16_to_f32(block.d), scale = static_cast<float>(block.scales[sixteen]);
  if (format == WeightFormat::kIq3S) return d * (1.0f + 2.0f * scale);
  return d * (0.5f + scale) * (format == WeightFormat::kIq3Xxs ? 0.5f : 0.25f);
}

void dequantize_grid_block(WeightFormat format, const uint8_t* block, float* values) {
  const GridBlock opened = open_grid_block(format, block);
  for (uint32_t sixteen = 0; sixteen < 16; ++sixteen) {
    const float factor = grid_factor(format, opened, sixteen);
    for (uint32_t k = 16 * sixteen; k < 16 * sixteen + 16; ++k) {
      const float product = factor * static_cast<float>(grid_magnitude(format, opened, k));
      values[k] = product * ((opened.signs[k / 8] >> (k % 8) & 1) != 0 ? -1.0f : 1.0f);
    }
  }
}

}  // namespace dflash::compute::internal
