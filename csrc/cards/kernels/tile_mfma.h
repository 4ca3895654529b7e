// Tiles of AMD's MFMA 16x16x16 in bf16 (gfx90a, gfx942), of which a wave of 64 threads is one team:
// with q = lane / 16 a thread has inputs 4q .. 4q + 3 of row lane % 16 and of output lane % 16, and
// the sums of rows 4q .. 4q + 3 with that output (AMD's matrix instruction calculator,
// v_mfma_f32_16x16x16_bf16). gfx908 has the instruction for 8 inputs: two of them, each with half
// of a thread's inputs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

#if defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
struct MfmaTile {
  static constexpr bool kExists = true;
  static constexpr uint32_t kLanes = 64;
  static constexpr uint32_t kValues = 4;
  using Halves2 = short __attribute__((ext_vector_type(2)));
  using Halves4 = short __attribute__((ext_vector_type(4)));
  using Floats4 = float __attribute__((ext_vector_type(4)));

  struct Operand {
    uint32_t words[2];
  };
  struct Sums {
    float values[kValues] = {};
  };

  GPU_FN static void sync_team() { sync_subgroup(); }  // of a wave, all of it

  template <class Units>
  GPU_FN static Operand load(Units& units, uint32_t first, uint32_t octet_step) {
    const uint32_t quarter = thread_index() % kLanes / 16;
    const Unit& unit = units.at(first + quarter / 2 * octet_step + thread_index() % 16);
    const uint2 words = *reinterpret_cast<const uint2*>(unit.words + quarter % 2 * 2);
    return {
        {words.x, words.y}
    };
  }

  GPU_FN static void multiply_add(Sums& sums, const Operand& rows, const Operand& weights) {
    Floats4 at = {sums.values[0], sums.values[1], sums.values[2], sums.values[3]};
#if defined(__gfx908__)
    GPU_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      at = __builtin_amdgcn_mfma_f32_16x16x8bf16(__builtin_bit_cast(Halves2, rows.words[half]),
                                                 __builtin_bit_cast(Halves2, weights.words[half]),
                                                 at, 0, 0, 0);
    }
#else
    at = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
        __builtin_bit_cast(Halves4, rows), __builtin_bit_cast(Halves4, weights), at, 0, 0, 0);
#endif
    GPU_UNROLL
    for (uint32_t i = 0; i < kValues; ++i) sums.values[i] = at[i];
  }

  GPU_FN static uint32_t row(uint32_t i) { return thread_index() % kLanes / 16 * 4 + i; }
  GPU_FN static uint32_t column(uint32_t) { return thread_index() % 16; }
};
#endif

}  // namespace dflash::compute::gpu
