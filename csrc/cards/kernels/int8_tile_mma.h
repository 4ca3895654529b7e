// The tile of class int8-groups on NVIDIA's integer mma.sync (sm_75 and later; the simulated NVIDIA
// card runs it too, over the instruction in words). A sub-group owns 32 x 32 sums. Fragments as in
// the PTX ISA, "Matrix Fragments for mma.m16n8k32": with g = lane / 4 and q = lane % 4 a thread has
// a word (4 inputs) of rows g, g + 8 and of output g per 16 inputs, and the sums of rows g, g + 8
// with outputs 2q, 2q + 1. Which word that is does not matter as long as rows and weights agree, so
// a thread takes neighbours: one load of 8 bytes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/int8_tile.h"

namespace dflash::compute::gpu {

#if defined(DFLASH_GPU_SIM)
// What the instruction says of the four sums of this lane.
template <uint32_t kSteps>
GPU_FN void integer_mma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  GPU_SHARED(WaveRegisters, registers);
  for (uint32_t i = 0; i < 2 * kSteps; ++i) registers.at(thread_index() * 8 + i) = rows[i];
  for (uint32_t i = 0; i < kSteps; ++i) registers.at(thread_index() * 8 + 4 + i) = weights[i];
  sync_subgroup();
  const uint32_t first_lane = subgroup_index() * kSubgroupLanes;
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row_lanes = first_lane + lane_index() / 4 * 4,
                   output_lanes = first_lane + (lane_index() % 4 * 2 + i % 2) * 4;
    for (uint32_t step = 0; step < kSteps; ++step) {
      for (uint32_t q = 0; q < 4; ++q) {
        sums[i] = dot4(registers.at((row_lanes + q) * 8 + step * 2 + i / 2),
                       registers.at((output_lanes + q) * 8 + 4 + step), sums[i]);
      }
    }
  }
  sync_subgroup();
}
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <uint32_t kSteps>
GPU_FN void integer_mma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  if constexpr (kSteps == 2) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
        "%9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(weights[0]), "r"(weights[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, "
        "%1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(rows[0]), "r"(rows[1]), "r"(weights[0]));
  }
}
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750
// sm_75 has eight rows and 16 inputs an instruction, in the same fragments.
template <uint32_t kSteps>
GPU_FN void integer_mma(const uint32_t* rows, const uint32_t* weights, int32_t* sums) {
  GPU_UNROLL
  for (uint32_t i = 0; i < 2 * kSteps; ++i) {
    int32_t* const at = sums + i % 2 * 2;
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(at[0]), "+r"(at[1])
        : "r"(rows[i]), "r"(weights[i / 2]));
  }
}
#endif

#if defined(DFLASH_GPU_SIM) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 750)
struct Int8MmaTile {
  static constexpr uint32_t kRows = 4, kColumns = 8;
  GPU_FN static uint32_t row(uint32_t i) {
    return subgroup_index() / 2 * 32 + i * 8 + lane_index() / 4;
  }
  GPU_FN static uint32_t column(uint32_t j) {
    return subgroup_index() % 2 * 32 + j / 2 * 8 + lane_index() % 4 * 2 + j % 2;
  }

  // A word per step of 16 inputs, of row or output `index`.
  template <uint32_t kFirstWord, uint32_t kSteps>
  GPU_FN static void load(const uint32_t* codes, uint32_t index, uint32_t* words) {
    const uint32_t* const at = codes + code_place(index, kFirstWord + lane_index() % 4 * kSteps);
    if constexpr (kSteps == 2) {
      const WordPair pair = *reinterpret_cast<const WordPair*>(at);
      words[0] = pair.words[0];
      words[1] = pair.words[1];
    } else {
      words[0] = *at;
    }
  }

  template <uint32_t kFirstWord, uint32_t kNumWords>
  GPU_FN static void multiply(const uint32_t* rows, const uint32_t* weights,
                              int32_t (*dots)[kColumns]) {
    constexpr uint32_t kSteps = kNumWords / 4;
    const uint32_t first_row = subgroup_index() / 2 * 32 + lane_index() / 4,
                   first_output = subgroup_index() % 2 * 32 + lane_index() / 4;
    uint32_t outputs[4][2];
    GPU_UNROLL
    for (uint32_t n = 0; n < 4; ++n)
      load<kFirstWord, kSteps>(weights, first_output + 8 * n, outputs[n]);
    GPU_UNROLL
    for (uint32_t m = 0; m < 2; ++m) {
      uint32_t upper[2], lower[2];
      load<kFirstWord, kSteps>(rows, first_row + 16 * m, upper);
      load<kFirstWord, kSteps>(rows, first_row + 16 * m + 8, lower);
      const uint32_t inputs[4] = {upper[0], lower[0], kSteps == 2 ? upper[1] : 0,
                                  kSteps == 2 ? lower[1] : 0};
      GPU_UNROLL
      for (uint32_t n = 0; n < 4; ++n) {
        int32_t sums[4] = {dots[2 * m][2 * n], dots[2 * m][2 * n + 1], dots[2 * m + 1][2 * n],
                           dots[2 * m + 1][2 * n + 1]};
        integer_mma<kSteps>(inputs, outputs[n], sums);
        GPU_UNROLL
        for (uint32_t i = 0; i < 4; ++i) dots[2 * m + i / 2][2 * n + i % 2] = sums[i];
      }
    }
  }
};
#endif

}  // namespace dflash::compute::gpu
