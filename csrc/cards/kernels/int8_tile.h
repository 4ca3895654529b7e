// Which of a block's 64 x 64 sums a thread has in the many-row kernel of class int8-groups, and how
// their integer dot products over a group of 32 inputs are computed. A tile type gives each thread
// kRows x kColumns sums (32 in all), says by row(i) and column(j) which these are, and has
//   multiply<kFirstWord, kNumWords>(rows, weights, dots), which adds to dots[i][j] the dot product
//   of the codes of row(i) and of column(j), over the given words of the group.
// The codes lie in shared memory: 64 rows of 8 words, four inputs to a word, at code_place(). The
// tile in this file uses dot4, for cards without matrix units for integers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_codes.h"
#include "cards/kernels/project_many.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kTileCodes = kManyTileRows * kGroupWords;  // words of one group

// Where word `word` of the group of row or output `index` lies. The halves of a group change places
// with every fourth index, so that eight neighbouring threads read 16 bytes each from different
// banks.
GPU_FN uint32_t code_place(uint32_t index, uint32_t word) {
  return index * kGroupWords + (word ^ (index & 4u));
}

struct alignas(8) WordPair {
  uint32_t words[2];
};

#if defined(DFLASH_GPU_SIM)
// For instructions in words: every thread's registers where the threads of its wave see them.
using WaveRegisters = SharedArray<uint32_t, kManyThreads * 8>;
#endif

// A sub-group has 32 x 32 sums, and a thread every fourth row and every eighth column of these.
struct Dot4Tile {
  static constexpr uint32_t kRows = 8, kColumns = 4;
  GPU_FN static uint32_t row(uint32_t i) {
    return subgroup_index() / 2 * 32 + i * 4 + lane_index() / 8;
  }
  GPU_FN static uint32_t column(uint32_t j) {
    return subgroup_index() % 2 * 32 + j * 8 + lane_index() % 8;
  }

  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void multiply(const uint32_t* rows, const uint32_t* weights,
                              int32_t (*dots)[kColumns]) {
    GPU_UNROLL
    for (uint32_t first = kFirstWord; first < kFirstWord + kNumWords; first += 4) {
      Unit columns[kColumns];
      GPU_UNROLL
      for (uint32_t j = 0; j < kColumns; ++j)
        columns[j] = load_16<Unit>(weights + code_place(column(j), first));
      GPU_UNROLL
      for (uint32_t i = 0; i < kRows; ++i) {
        const Unit codes = load_16<Unit>(rows + code_place(row(i), first));
        GPU_UNROLL
        for (uint32_t j = 0; j < kColumns; ++j) {
          GPU_UNROLL
          for (uint32_t w = 0; w < 4; ++w)
            dots[i][j] = dot4(codes.words[w], columns[j].words[w], dots[i][j]);
        }
      }
    }
  }
};

}  // namespace dflash::compute::gpu
