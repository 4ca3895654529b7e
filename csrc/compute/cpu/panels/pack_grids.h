// Takes blocks with grids apart for panels (panel_layout.h): indices and scales nearly as they are
// stored, signs in the order in which kernels shift them to their bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstring>

#include "compute/cpu/panels/record_tiles.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/grid_table.h"

namespace dflash::compute {

// Moves bit b of a nibble to bit 8b.
inline uint32_t spread_nibble(uint32_t nibble) { return nibble * 0x00204081u & 0x01010101u; }

// The signs of octet `octet` of 32 inputs at their places in the word of signs.
inline uint32_t place_signs(uint32_t signs, uint32_t octet) {
  return spread_nibble(signs & 15u) << octet | spread_nibble(signs >> 4) << (octet + 4);
}

// The word of iq3_xxs and iq2_xxs: seven signs per octet from the lowest bits on, then a scale. The
// eighth sign's places, bits 28..31, get the scale.
inline uint32_t place_signs_and_scale(const uint8_t* stored) {
  uint32_t word;
  std::memcpy(&word, stored, sizeof(word));
  uint32_t placed = word & 0xf0000000u;
  for (uint32_t octet = 0; octet < 4; ++octet)
    placed |= place_signs(word >> (7 * octet) & 127u, octet);
  return placed;
}

inline uint32_t place_stored_signs(const uint8_t* stored) {
  uint32_t placed = 0;
  for (uint32_t octet = 0; octet < 4; ++octet) placed |= place_signs(stored[octet], octet);
  return placed;
}

inline void put_iq3(bool is_xxs, const uint8_t* block, uint32_t* words, uint8_t* scales) {
  for (uint32_t group = 0; group < 8; ++group, words += 3) {
    std::memcpy(words, block + 2 + 8 * group, 8);
    if (is_xxs) {
      words[2] = place_signs_and_scale(block + 66 + 4 * group);
      continue;
    }
    words[2] = place_stored_signs(block + 74 + 4 * group);
    const uint32_t scale = uint32_t{block[106 + group / 2]} >> (group % 2 * 4) & 15u;
    scales[2 * group] = static_cast<uint8_t>(1 + 2 * scale);
    scales[2 * group + 1] = block[66 + group];
  }
}

inline void put_iq2_xxs(const uint8_t* block, uint32_t* words) {
  for (uint32_t group = 0; group < 8; ++group, words += 2) {
    std::memcpy(words, block + 2 + 8 * group, 4);
    words[1] = place_signs_and_scale(block + 6 + 8 * group);
  }
}

inline void put_iq2_xs(const uint8_t* block, uint32_t* words, uint8_t* scales) {
  for (uint32_t group = 0; group < 8; ++group, words += 2) {
    words[0] = words[1] = 0;
    for (uint32_t octet = 0; octet < 4; ++octet) {
      const uint32_t both = internal::load_u16(block + 2 + 8 * group + 2 * octet);
      words[0] |= (both & 255u) << (8 * octet);
      words[1] |= place_signs(both >> 9, octet) | (both >> 8 & 1u) << (28 + octet);
    }
    scales[group] = block[66 + group];
  }
}

inline void put_iq2_s(const uint8_t* block, uint32_t* words, uint8_t* scales) {
  for (uint32_t group = 0; group < 8; ++group, words += 2) {
    std::memcpy(words, block + 2 + 4 * group, 4);
    words[1] = place_stored_signs(block + 34 + 4 * group);
    scales[2 * group] = block[74 + group];
    scales[2 * group + 1] = block[66 + group];
  }
}

template <WeightFormat kFormat>
void put_grid(const uint8_t* block, RecordFields<kFormat>& fields) {
  fields.headers[0] = internal::load_u16(block);
  if constexpr (kFormat == WeightFormat::kIq3Xxs || kFormat == WeightFormat::kIq3S)
    put_iq3(kFormat == WeightFormat::kIq3Xxs, block, fields.words, fields.scales);
  else if constexpr (kFormat == WeightFormat::kIq2Xxs)
    put_iq2_xxs(block, fields.words);
  else if constexpr (kFormat == WeightFormat::kIq2Xs)
    put_iq2_xs(block, fields.words, fields.scales);
  else
    put_iq2_s(block, fields.words, fields.scales);
}

}  // namespace dflash::compute
