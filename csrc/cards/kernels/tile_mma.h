// Tiles of NVIDIA's mma.sync.m16n8k16 (sm_80 and later), two of them side by side. Fragments as in
// the PTX ISA, "Matrix Fragments for mma.m16n8k16": with g = lane / 4 and q = lane % 4 a thread has
// inputs 2q, 2q + 1 (and 8 more) of rows g and g + 8 and of output g. ldmatrix brings both operands
// there, since both lie input by input: registers 0..3 are (rows 0-7, 8-15) of octet 0, then of
// octet 1.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/portable.h"

namespace dflash::compute::gpu {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
struct MmaTile {
  static constexpr bool kExists = true;
  static constexpr uint32_t kLanes = 32;
  static constexpr uint32_t kValues = 8;

  struct Operand {
    uint32_t words[4];
  };
  struct Sums {
    float values[kValues] = {};  // four of outputs 0-7, four of outputs 8-15
  };

  GPU_FN static void sync_team() { sync_subgroup(); }

  // Eight neighbouring units are read at once: 128 bytes, no bank twice.
  template <class Units>
  GPU_FN static Operand load(Units& units, uint32_t first, uint32_t octet_step) {
    const uint32_t lane = lane_index();
    const auto at = static_cast<uint32_t>(
        __cvta_generic_to_shared(&units.at(first + lane / 16 * octet_step + lane % 16)));
    Operand loaded;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]),
                   "=r"(loaded.words[3])
                 : "r"(at)
                 : "memory");
    return loaded;
  }

  GPU_FN static void multiply_add(Sums& sums, const Operand& rows, const Operand& weights) {
    GPU_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
      float* const at = sums.values + 4 * half;
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
          "{%8, %9}, {%0, %1, %2, %3};"
          : "+f"(at[0]), "+f"(at[1]), "+f"(at[2]), "+f"(at[3])
          : "r"(rows.words[0]), "r"(rows.words[1]), "r"(rows.words[2]), "r"(rows.words[3]),
            "r"(weights.words[half]), "r"(weights.words[2 + half]));
    }
  }

  GPU_FN static uint32_t row(uint32_t i) { return lane_index() / 4 + i % 4 / 2 * 8; }
  GPU_FN static uint32_t column(uint32_t i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }
};
#endif

}  // namespace dflash::compute::gpu
