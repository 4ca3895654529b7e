// The tile of class int8-groups on AMD's integer WMMA, 16 x 16 sums over 16 inputs by waves of 32,
// of which a sub-group owns 2 x 2. RDNA 3 (gfx1100): a thread has all inputs of row and output lane
// % 16, both halves of a wave the same, and the sums of every second row. RDNA 4 (gfx1201): the
// halves share the inputs, eight each, and have eight neighbouring rows of sums each. (AMD's RDNA 3
// and RDNA 4 instruction set guides, "Wave Matrix Multiply Accumulate".)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_tile.h"

namespace dflash::compute::gpu {

#if defined(__GFX12__)
inline constexpr uint32_t kWmmaWords = 2;
#else
inline constexpr uint32_t kWmmaWords = 4;
#endif

#if defined(DFLASH_GPU_SIM)
// What RDNA 3's v_wmma_i32_16x16x16_iu8 says of the eight sums of this lane.
GPU_FN void integer_wmma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  GPU_SHARED(WaveRegisters, registers);
  for (uint32_t i = 0; i < 4; ++i) {
    registers.at(thread_index() * 8 + i) = rows[i];
    registers.at(thread_index() * 8 + 4 + i) = weights[i];
  }
  sync_subgroup();
  const uint32_t wave = subgroup_index() * kSubgroupLanes;
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t row_lane = wave + 2 * i + lane_index() / 16,
                   output_lane = wave + lane_index() % 16;
    for (uint32_t w = 0; w < 4; ++w)
      sums[i] =
          dot4(registers.at(row_lane * 8 + w), registers.at(output_lane * 8 + 4 + w), sums[i]);
  }
  sync_subgroup();
}
#elif defined(__GFX11__) || defined(__GFX12__)
GPU_FN void integer_wmma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  using Words = int32_t __attribute__((ext_vector_type(kWmmaWords)));
  using Integers8 = int32_t __attribute__((ext_vector_type(8)));
  Words inputs, factors;
  Integers8 at;
  GPU_UNROLL
  for (uint32_t i = 0; i < kWmmaWords; ++i) {
    inputs[i] = static_cast<int32_t>(rows[i]);
    factors[i] = static_cast<int32_t>(weights[i]);
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < 8; ++i) at[i] = sums[i];
#if defined(__GFX11__)
  at = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, inputs, true, factors, at, false);
#else
  at = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, inputs, true, factors, at, false);
#endif
  GPU_UNROLL
  for (uint32_t i = 0; i < 8; ++i) sums[i] = at[i];
}
#endif

#if defined(DFLASH_GPU_SIM) || defined(__GFX11__) || defined(__GFX12__)
struct Int8WmmaTile {
  static constexpr uint32_t kRows = 16, kColumns = 2;

  GPU_FN static uint32_t row(uint32_t i) {
    const uint32_t half = lane_index() / 16,
                   in_tile = kWmmaWords == 4 ? i % 8 * 2 + half : half * 8 + i % 8;
    return subgroup_index() / 2 * 32 + i / 8 * 16 + in_tile;
  }
  GPU_FN static uint32_t column(uint32_t j) {
    return subgroup_index() % 2 * 32 + j * 16 + lane_index() % 16;
  }

  // This thread's words of row or output `index`, of the 16 inputs from word `first` on.
  GPU_FN static void load(const uint32_t* codes, uint32_t index, uint32_t first, uint32_t* words) {
    if constexpr (kWmmaWords == 4) {
      const Unit unit = load_16<Unit>(codes + code_place(index, first));
      GPU_UNROLL
      for (uint32_t i = 0; i < 4; ++i) words[i] = unit.words[i];
    } else {
      const WordPair pair = *reinterpret_cast<const WordPair*>(
          codes + code_place(index, first + lane_index() / 16 * 2));
      words[0] = pair.words[0];
      words[1] = pair.words[1];
    }
  }

  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void multiply(const uint32_t* rows, const uint32_t* weights,
                              int32_t (*dots)[kColumns]) {
    GPU_UNROLL
    for (uint32_t m = 0; m < 2; ++m) {
      GPU_UNROLL
      for (uint32_t n = 0; n < 2; ++n) {
        int32_t sums[8];
        GPU_UNROLL
        for (uint32_t i = 0; i < 8; ++i) sums[i] = dots[8 * m + i][n];
        GPU_UNROLL
        for (uint32_t first = kFirstWord; first < kFirstWord + kNumWords; first += 4) {
          uint32_t inputs[kWmmaWords], factors[kWmmaWords];
          load(rows, subgroup_index() / 2 * 32 + m * 16 + lane_index() % 16, first, inputs);
          load(weights, column(n), first, factors);
          integer_wmma(inputs, factors, sums);
        }
        GPU_UNROLL
        for (uint32_t i = 0; i < 8; ++i) dots[8 * m + i][n] = sums[i];
      }
    }
  }
};
#endif

}  // namespace dflash::compute::gpu
