// The tile of class int8-groups on AMD's integer WMMA, 16 x 16 sums over 16 inputs by waves of 32, of which a sub-group owns 2 x 2. RDNA 3
// (gfx1100): a thread has all inputs of row and output lane % 16, both halves of a wave the same, and the sums of every second row. RDNA 4
// (gfx1201): the halves share the inputs, eight each, and have eight neighbouring rows of sums each. (AMD's RDNA 3 and RDNA 4 instruction set
// guides, "Wave Matrix Multiply Accumulate".)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/gpu/kernels/int8_tile.h"

namespace dflash::compute::gpu {

#if defined(__GFX11__) || defined(__GFX12__)
struct Int8WmmaTile {
  static constexpr uint32_t kRows = 16, kColumns = 2;
#if defined(__GFX11__)
  static constexpr uint32_t kWords = 4;
#else
  static constexpr uint32_t kWords = 2;
#endif
  using Words = int32_t __attribute__((ext_vector_type(kWords)));
  using Integers8 = int32_t __attribute__((ext_vector_type(8)));

  GPU_FN static uint32_t row(uint32_t i) {
#if defined(__GFX11__)
    const uint32_t in_tile = i % 8 * 2 + lane_index() / 16;
#else
    const uint32_t in_tile = lane_index() / 16 * 8 + i % 8;
#endif
    return subgroup_index() / 2 * 32 + i / 8 * 16 + in_tile;
  }
  GPU_FN static uint32_t column(uint32_t j) { return subgroup_index() % 2 * 32 + j * 16 + lane_index() % 16; }

  // This thread's words of row or output `index`, 16 inputs from word `first` on.
  GPU_FN static Words load(const uint32_t* codes, uint32_t index, uint32_t first) {
#if defined(__GFX11__)
    return *reinterpret_cast<const Words*>(codes + code_place(index, first));
#else
    return *reinterpret_cast<const Words*>(codes + code_place(index, first + lane_index() / 16 * 2));
#endif
  }

  GPU_FN static Integers8 multiply_add(Words rows, Words weights, Integers8 sums) {
#if defined(__GFX11__)
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, rows, true, weights, sums, false);
#else
    return __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(true, rows, true, weights, sums, false);
#endif
  }

  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void multiply(const uint32_t* rows, const uint32_t* weights, int32_t (*dots)[kColumns]) {
    GPU_UNROLL
    for (uint32_t m = 0; m < 2; ++m) {
      GPU_UNROLL
      for (uint32_t n = 0; n < 2; ++n) {
        Integers8 sums;
        GPU_UNROLL
        for (uint32_t i = 0; i < 8; ++i) sums[i] = dots[8 * m + i][n];
        GPU_UNROLL
        for (uint32_t first = kFirstWord; first < kFirstWord + kNumWords; first += 4) {
          sums = multiply_add(load(rows, subgroup_index() / 2 * 32 + m * 16 + lane_index() % 16, first), load(weights, column(n), first), sums);
        }
        GPU_UNROLL
        for (uint32_t i = 0; i < 8; ++i) dots[8 * m + i][n] = sums[i];
      }
    }
  }
};
#endif

}  // namespace dflash::compute::gpu
