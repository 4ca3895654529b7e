// The tile of class int8-groups on AMD's integer MFMA (gfx908, gfx90a: 16 inputs an instruction;
// gfx942: 32). A wave of 64 threads owns 32 x 64 sums: with q = lane / 16 a thread has inputs of
// row lane % 16 and of output lane % 16, and the sums of rows 4q .. 4q + 3 with that output (AMD's
// matrix instruction calculator, v_mfma_i32_16x16x16_i8, v_mfma_i32_16x16x32_i8). Which inputs a
// thread has does not matter as long as rows and weights agree.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_tile.h"

namespace dflash::compute::gpu {

#if defined(DFLASH_GPU_SIM)
// What v_mfma_i32_16x16x32_i8 says of the four sums of this lane.
template <uint32_t kNumWords>
GPU_FN void integer_mfma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  GPU_SHARED(WaveRegisters, registers);
  for (uint32_t i = 0; i < 2; ++i) {
    registers.at(thread_index() * 8 + i) = rows[i];
    registers.at(thread_index() * 8 + 2 + i) = weights[i];
  }
  sync_block();  // both waves come here equally often
  const uint32_t wave = thread_index() / 64 * 64, lane = thread_index() % 64;
  for (uint32_t i = 0; i < 4; ++i) {
    for (uint32_t quarter = 0; quarter < 64; quarter += 16) {
      const uint32_t row_lane = wave + quarter + lane / 16 * 4 + i,
                     output_lane = wave + quarter + lane % 16;
      for (uint32_t w = 0; w < 2; ++w)
        sums[i] =
            dot4(registers.at(row_lane * 8 + w), registers.at(output_lane * 8 + 2 + w), sums[i]);
    }
  }
  sync_block();
}
#elif defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
template <uint32_t kNumWords>
GPU_FN void integer_mfma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  using Integers4 = int32_t __attribute__((ext_vector_type(4)));
  Integers4 at = {sums[0], sums[1], sums[2], sums[3]};
#if defined(__gfx942__)
  // Half a group is multiplied with zeros behind it: the instruction for 16 inputs is gone.
  const auto inputs = static_cast<int64_t>(uint64_t{rows[1]} << 32 | rows[0]);
  const auto factors = static_cast<int64_t>(uint64_t{weights[1]} << 32 | weights[0]);
  at = __builtin_amdgcn_mfma_i32_16x16x32_i8(inputs, factors, at, 0, 0, 0);
#else
  at = __builtin_amdgcn_mfma_i32_16x16x16i8(static_cast<int>(rows[0]), static_cast<int>(weights[0]),
                                            at, 0, 0, 0);
  if constexpr (kNumWords == 8) {
    at = __builtin_amdgcn_mfma_i32_16x16x16i8(static_cast<int>(rows[1]),
                                              static_cast<int>(weights[1]), at, 0, 0, 0);
  }
#endif
  GPU_UNROLL
  for (uint32_t i = 0; i < 4; ++i) sums[i] = at[i];
}
#endif

#if defined(DFLASH_GPU_SIM) || defined(__gfx908__) || defined(__gfx90a__) || defined(__gfx942__)
struct Int8MfmaTile {
  static constexpr uint32_t kRows = 8, kColumns = 4;
  GPU_FN static uint32_t wave() { return thread_index() / 64; }
  GPU_FN static uint32_t quarter() { return thread_index() % 64 / 16; }
  GPU_FN static uint32_t row(uint32_t i) {
    return wave() * 32 + i / 4 * 16 + quarter() * 4 + i % 4;
  }
  GPU_FN static uint32_t column(uint32_t j) { return j * 16 + thread_index() % 16; }

  // This thread's words of row or output `index`: two of a whole group, one of half a group.
  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void load(const uint32_t* codes, uint32_t index, uint32_t* words) {
    if constexpr (kNumWords == 8) {
      const WordPair pair =
          *reinterpret_cast<const WordPair*>(codes + code_place(index, 2 * quarter()));
      words[0] = pair.words[0];
      words[1] = pair.words[1];
    } else {
      words[0] = codes[code_place(index, kFirstWord + quarter())];
      words[1] = 0;
    }
  }

  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void multiply(const uint32_t* rows, const uint32_t* weights,
                              int32_t (*dots)[kColumns]) {
    uint32_t outputs[4][2];
    GPU_UNROLL
    for (uint32_t n = 0; n < 4; ++n) load<kFirstWord, kNumWords>(weights, column(n), outputs[n]);
    GPU_UNROLL
    for (uint32_t m = 0; m < 2; ++m) {
      uint32_t inputs[2];
      load<kFirstWord, kNumWords>(rows, wave() * 32 + m * 16 + thread_index() % 16, inputs);
      GPU_UNROLL
      for (uint32_t n = 0; n < 4; ++n) {
        int32_t sums[4] = {dots[4 * m][n], dots[4 * m + 1][n], dots[4 * m + 2][n],
                           dots[4 * m + 3][n]};
        integer_mfma<kNumWords>(inputs, outputs[n], sums);
        GPU_UNROLL
        for (uint32_t i = 0; i < 4; ++i) dots[4 * m + i][n] = sums[i];
      }
    }
  }
};
#endif

}  // namespace dflash::compute::gpu
