// The kernels of numerics class int8-groups for AArch64's matrix multiplication of bytes. Many rows
// take SMMLA, which multiplies 2 rows x 8 inputs x 2 outputs; few rows take SDOT as in
// kernels_neon_dotprod.cc. Sums of integers are exact, so that both have the class's bits.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
// This file gives the vector type a name of its own, so that nothing instantiated here is linked
// into code for processors without the instruction.
#define NeonVector NeonI8mmVector
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct SmmlaBytes : NeonBytes {
  // A tile takes 12 integer sums, 12 float sums, 4 vectors of codes and one of inputs: 29 registers
  // of 32.
  static constexpr uint32_t kTileRows = 6;
  static constexpr size_t kStepBytes = 32;  // codes of four inputs of a panel's eight outputs

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    return vdotq_s32(sum, vreinterpretq_s8_s32(codes), vreinterpretq_s8_s32(inputs));
  }

  // Reorders the codes of each two steps. Before, a step has four inputs of outputs 0..3 and then
  // of 4..7; after, there are eight inputs of outputs 0 and 1, then of 2 and 3, 4 and 5, 6 and 7.
  // `num_steps` is even, because every group has an even number of steps.
  static void arrange(uint8_t* codes, uint32_t num_steps) {
    for (uint32_t s = 0; s < num_steps; s += 2, codes += 2 * kStepBytes) {
      const int32x4_t low[2] = {NeonVector::load_words(codes),
                                NeonVector::load_words(codes + kStepBytes)};
      const int32x4_t high[2] = {NeonVector::load_words(codes + 16),
                                 NeonVector::load_words(codes + kStepBytes + 16)};
      const int32x4_t pairs[4] = {vzip1q_s32(low[0], low[1]), vzip2q_s32(low[0], low[1]),
                                  vzip1q_s32(high[0], high[1]), vzip2q_s32(high[0], high[1])};
      for (uint32_t pair = 0; pair < 4; ++pair)
        __builtin_memcpy(codes + 16 * pair, &pairs[pair], sizeof(pairs[pair]));
    }
  }

  // Returns eight inputs of row m, then of the row after it. Behind the last row stands that row
  // itself again, whose second sums nobody reads.
  template <class Row, int M>
  [[gnu::always_inline]] static inline int8x16_t inputs_of(const Int8Block* const (&blocks)[M],
                                                           int m, uint32_t group, uint32_t step) {
    return vcombine_s8(vld1_s8(Row::codes(*blocks[m], group, step)),
                       vld1_s8(Row::codes(*blocks[m + 1 < M ? m + 1 : m], group, step)));
  }

  // Sets dots[m][h] to the sums of row m for outputs 4h..4h+3, which are exact.
  template <class Row, uint32_t kSteps, int M>
  [[gnu::always_inline]] static inline void multiply_group(const uint8_t* codes,
                                                           const Int8Block* const (&blocks)[M],
                                                           uint32_t group, I (&dots)[M][2]) {
    constexpr int kPairs = (M + 1) / 2;
    I sums[kPairs][4];  // sums[p][q] belongs to rows 2p, 2p + 1 and outputs 2q, 2q + 1, row by row
#pragma GCC unroll 4
    for (int p = 0; p < kPairs; ++p) {
      const int second = 2 * p + 1 < M ? 2 * p + 1 : 2 * p;
      const I start = vcombine_s32(vdup_n_s32(Row::start(*blocks[2 * p], group)),
                                   vdup_n_s32(Row::start(*blocks[second], group)));
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) sums[p][q] = start;
    }
#pragma GCC unroll 4
    for (uint32_t s = 0; s < kSteps; s += 2, codes += 2 * kStepBytes) {
      int8x16_t outputs[4];
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q)
        outputs[q] = vreinterpretq_s8_s32(NeonVector::load_words(codes + 16 * q));
#pragma GCC unroll 4
      for (int p = 0; p < kPairs; ++p) {
        const int8x16_t inputs = inputs_of<Row>(blocks, 2 * p, group, s);
#pragma GCC unroll 4
        for (int q = 0; q < 4; ++q) sums[p][q] = vmmlaq_s32(sums[p][q], inputs, outputs[q]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const int64x2_t first = vreinterpretq_s64_s32(sums[m / 2][2 * h]),
                        second = vreinterpretq_s64_s32(sums[m / 2][2 * h + 1]);
        dots[m][h] = vreinterpretq_s32_s64(m % 2 == 0 ? vzip1q_s64(first, second)
                                                      : vzip2q_s64(first, second));
      }
    }
  }
};

}  // namespace

constinit const KernelSet kNeonI8mmInt8 = make_int8_set<NeonVector, SmmlaBytes>();

}  // namespace dflash::compute
#endif
