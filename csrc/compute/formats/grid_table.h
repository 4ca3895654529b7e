// The tables that formats choose from: grids, and levels. The one table of grids has the groups of
// magnitudes that the GGUF types with grids choose from. An entry is four values (iq3_*) or eight
// (iq2_*), a byte each, the first in the lowest byte of a word; an index names an entry. The grids
// are data of these formats, which ggml defined.
//
// Kernels of every instruction set look values up in them, because of which there is no std:: code
// here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "compute/formats/weight_format.h"

namespace dflash::compute {

// Where the grid of a format lies in the table, and what its entries are.
struct GridFacts {
  uint32_t first_word;   // of the grid
  uint32_t num_entries;  // a power of two: every index of a block names an entry
  uint32_t entry_words;  // 1 or 2, of four values each; 0 for a format without a grid
};
constexpr GridFacts grid_facts(WeightFormat format) {
  switch (format) {
    case WeightFormat::kIq3Xxs: return {0, 256, 1};
    case WeightFormat::kIq3S:   return {256, 512, 1};
    case WeightFormat::kIq2Xxs: return {768, 256, 2};
    case WeightFormat::kIq2Xs:  return {1280, 512, 2};
    case WeightFormat::kIq2S:   return {2304, 1024, 2};
    default:                    return {0, 0, 0};
  }
}
// The grid of iq1_s and iq1_m, 2,048 entries of two words; its values are -1, 0 and 1 in int8.
inline constexpr uint32_t kFirstIq1Word = 4352;
inline constexpr uint32_t kNumGridWords = 8448;
// Whether kernels look the format's entries up.
constexpr bool has_grid(WeightFormat format) { return grid_facts(format).entry_words != 0; }

// 33 KiB, of which a kernel touches the part of its format: 1 to 8 KiB, which stay in the
// first-level cache.
struct GridTable {
  alignas(64) uint32_t words[kNumGridWords];
};
extern const GridTable kGridTable;

// The values of e2m1: a sign, two bits of exponent, one of mantissa.
inline constexpr float kE2m1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                    -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
// ggml's non-linear levels of iq4_nl and iq4_xs.
inline constexpr float kIq4Levels[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f,
                                         -22.0f,  -10.0f,  1.0f,   13.0f,  25.0f,  38.0f,
                                         53.0f,   69.0f,   89.0f,  113.0f};

}  // namespace dflash::compute
