// Tiles of AMD's WMMA 16x16x16 in bf16, by waves of 32. RDNA 3 (gfx1100): a thread has all 16
// inputs of row and output lane % 16, both halves of a wave the same, and the sums of every second
// row. RDNA 4 (gfx1201): the halves of a wave share the inputs, eight each, and have eight
// neighbouring rows of sums each. (AMD's RDNA 3 and RDNA 4 instruction set guides, "Wave Matrix
// Multiply Accumulate".)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

#if defined(__gfx1100__) || defined(__gfx1201__)
struct WmmaTile {
  static constexpr bool kExists = true;
  static constexpr uint32_t kLanes = 32;
  static constexpr uint32_t kValues = 8;
#if defined(__gfx1100__)
  static constexpr uint32_t kUnits = 2;
#else
  static constexpr uint32_t kUnits = 1;
#endif
  using Halves = short __attribute__((ext_vector_type(8 * kUnits)));
  using Floats8 = float __attribute__((ext_vector_type(8)));

  struct Operand {
    Unit units[kUnits];
  };
  struct Sums {
    float values[kValues] = {};
  };

  GPU_FN static void sync_team() { sync_subgroup(); }

  template <class Units>
  GPU_FN static Operand load(Units& units, uint32_t first, uint32_t octet_step) {
    const uint32_t lane = lane_index();
#if defined(__gfx1100__)
    return {
        {load_16<Unit>(&units.at(first + lane % 16)),
         load_16<Unit>(&units.at(first + octet_step + lane % 16))}
    };
#else
    return {{load_16<Unit>(&units.at(first + lane / 16 * octet_step + lane % 16))}};
#endif
  }

  GPU_FN static void multiply_add(Sums& sums, const Operand& rows, const Operand& weights) {
    Floats8 at;
    GPU_UNROLL
    for (uint32_t i = 0; i < kValues; ++i) at[i] = sums.values[i];
    const auto left = __builtin_bit_cast(Halves, rows), right = __builtin_bit_cast(Halves, weights);
#if defined(__gfx1100__)
    at = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(left, right, at);
#else
    at = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(left, right, at);
#endif
    GPU_UNROLL
    for (uint32_t i = 0; i < kValues; ++i) sums.values[i] = at[i];
  }

#if defined(__gfx1100__)
  GPU_FN static uint32_t row(uint32_t i) { return 2 * i + lane_index() / 16; }
#else
  GPU_FN static uint32_t row(uint32_t i) { return lane_index() / 16 * 8 + i; }
#endif
  GPU_FN static uint32_t column(uint32_t) { return lane_index() % 16; }
};
#endif

}  // namespace dflash::compute::gpu
