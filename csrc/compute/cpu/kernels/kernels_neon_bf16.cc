// The kernels of numerics class bf16-bfdot for AArch64's BF16 extension. Each output is summed over
// blocks of 256 inputs: one chain per block from +0 over ascending pairs of inputs, with zeros up
// to a multiple of two pairs, and the block sums added in ascending order. Weights and rows have
// the layout of pack_bf16_pairs. Few rows are bound by reading the weights and take BFDOT. Many
// rows take BFMMLA, which multiplies 2 rows x 4 inputs x 2 outputs and is defined as two BFDOTs per
// output with pairs ascending, so that the bits are the same.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
// This file gives the vector type a name of its own, so that nothing instantiated here is linked
// into code for processors without the instructions.
#define NeonVector NeonBf16Vector
#include "compute/cpu/kernels/vector_neon.h"

#include "compute/cpu/kernels/bf16_pairs.h"

namespace dflash::compute {
namespace {

using V = NeonBf16Vector;
constexpr int kWidth = kPanelWidth<V>;

[[gnu::always_inline]] inline bfloat16x8_t as_bf16(uint32x4_t words) {
  return vreinterpretq_bf16_u32(words);
}

// Loads a pair of inputs of outputs 0..3 and 4..7.
[[gnu::always_inline]] inline void load_pair(const uint8_t* at, uint32x4_t (&words)[2]) {
  words[0] = vreinterpretq_u32_u8(vld1q_u8(at));
  words[1] = vreinterpretq_u32_u8(vld1q_u8(at + 16));
}

// Loads an odd last input: 16 bits per output, the other half of each word zero. The caller must
// also clear the other half of the row's last word, since 0 * NaN is not 0.
[[gnu::always_inline]] inline void load_last(const uint8_t* at, uint32x4_t (&words)[2]) {
  const uint16x8_t halves = vreinterpretq_u16_u8(vld1q_u8(at));
  words[0] = vmovl_u16(vget_low_u16(halves));
  words[1] = vmovl_high_u16(halves);
}

// Loads what the end of a matrix leaves of a pair, of the weights and of a row: both inputs, one or
// none.
[[gnu::always_inline]] inline void load_pair_of(const uint8_t* at, uint32_t num_inputs,
                                                uint32x4_t (&words)[2]) {
  words[0] = words[1] = vdupq_n_u32(0);
  if (num_inputs >= 2)
    load_pair(at, words);
  else if (num_inputs == 1)
    load_last(at, words);
}
[[gnu::always_inline]] inline uint32_t input_pair_of(const void* row, size_t pair,
                                                     uint32_t num_inputs) {
  if (num_inputs == 0) return 0;
  const uint32_t word = static_cast<const uint32_t*>(row)[pair];
  return num_inputs == 1 ? word & 0xffff : word;
}

template <int M, int N>
[[gnu::always_inline]] inline void add_dots(const uint32x4_t (&words)[2],
                                            const uint32_t (&inputs)[M], int first,
                                            float32x4_t (&sums)[M][N]) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
    const bfloat16x8_t input = as_bf16(vdupq_n_u32(inputs[m]));
    sums[m][first] = vbfdotq_f32(sums[m][first], as_bf16(words[0]), input);
    sums[m][first + 1] = vbfdotq_f32(sums[m][first + 1], as_bf16(words[1]), input);
  }
}

struct FewRowsKernel {
  template <int M>
  static constexpr int kPanels = panels_at_once<V>(M);

  template <int M, int NP>
  static void chain(const float* const* encoded, const Streams& streams, uint32_t k_begin,
                    uint32_t k_end, float* tile, size_t tile_stride) {
    float32x4_t sums[M][2 * NP];
    const void* rows[M];
    start_sums<V>(reinterpret_cast<const void* const*>(encoded), rows, sums);
    const uint8_t* first = streams.first + size_t{2} * kWidth * k_begin;
    const size_t ahead = distance_ahead<kFloatAhead<NP>>(first, streams);
    uint32x4_t words[2];
    uint32_t inputs[M];
    size_t pair = k_begin / 2;
    for (; pair < k_end / 2; ++pair, first += kPairBytes<V>) {
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) inputs[m] = static_cast<const uint32_t*>(rows[m])[pair];
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        const uint8_t* at = first + static_cast<size_t>(p) * streams.panel_bytes;
        prefetch<kPairBytes<V>>(at + ahead);
        load_pair(at, words);
        add_dots(words, inputs, 2 * p, sums);
      }
    }
    // One or two more pairs complete the last four inputs; a pair of zeros adds +0.
    for (size_t end = (size_t{k_end} + 3) / 4 * 2; pair < end; ++pair, first += kPairBytes<V>) {
      const uint32_t left = k_end > 2 * pair ? k_end - static_cast<uint32_t>(2 * pair) : 0;
      for (int m = 0; m < M; ++m) inputs[m] = input_pair_of(rows[m], pair, left);
      for (int p = 0; p < NP; ++p) {
        load_pair_of(first + static_cast<size_t>(p) * streams.panel_bytes, left, words);
        add_dots(words, inputs, 2 * p, sums);
      }
    }
    store_sums<V>(sums, k_begin == 0, tile, tile_stride);
  }
};

// Multiplies rows in pairs with two pairs of inputs at once. products[r][q] belongs to rows 2r and
// 2r + 1 and to outputs 2q and 2q + 1, row by row.
template <int P>
[[gnu::always_inline]] inline void add_products(const uint32x4_t (&first)[2],
                                                const uint32x4_t (&second)[2],
                                                const uint64x2_t (&inputs)[P],
                                                float32x4_t (&products)[P][4]) {
  const bfloat16x8_t outputs[4] = {
      as_bf16(vzip1q_u32(first[0], second[0])), as_bf16(vzip2q_u32(first[0], second[0])),
      as_bf16(vzip1q_u32(first[1], second[1])), as_bf16(vzip2q_u32(first[1], second[1]))};
#pragma GCC unroll 6
  for (int r = 0; r < P; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q)
      products[r][q] = vbfmmlaq_f32(products[r][q], vreinterpretq_bf16_u64(inputs[r]), outputs[q]);
  }
}

// Rounds to the nearest bf16, ties to even, as `convert` does.
inline uint16x4_t round_to_bf16(float32x4_t values) {
  const uint32x4_t bits = vreinterpretq_u32_f32(values);
  const uint32x4_t high = vshrq_n_u32(bits, 16);
  const uint32x4_t odd = vandq_u32(high, vdupq_n_u32(1));
  const uint32x4_t rounded = vshrq_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
  const uint32x4_t is_number = vceqq_f32(values, values);
  return vmovn_u32(vbslq_u32(is_number, rounded, vorrq_u32(high, vdupq_n_u32(0x40))));
}

struct MatrixProducts {
  static constexpr NumericsClass kNumerics = NumericsClass::kBf16Bfdot;
  static constexpr uint32_t kInputs = 4, kRows = 2;
  using FewRows = FewRowsKernel;

  // The rows are taken in pairs. Behind the last one of an odd number stands that row again, whose
  // second sums are not stored.
  template <int M>
  static void block_tile(const void* const* from, const PairBlock& block, float* tile,
                         size_t tile_stride) {
    constexpr int kPairs = (M + 1) / 2;
    float32x4_t products[kPairs][4];
    float32x4_t sums[M][2];
    const void* rows[M];
    start_sums<V>(from, rows, sums);
#pragma GCC unroll 6
    for (int r = 0; r < kPairs; ++r)
      products[r][0] = products[r][1] = products[r][2] = products[r][3] = vdupq_n_f32(0.0f);
    uint32x4_t first[2], second[2];
    uint64x2_t inputs[kPairs];
    const uint8_t* at = block.weights;
    const uint8_t* next = block.next;
    size_t pair = block.first_pair;
    for (const size_t end = pair + block.num_inputs / 4 * 2; pair < end;
         pair += 2, at += 2 * kPairBytes<V>, next += block.ahead) {
      __builtin_prefetch(next, 0, 3);
      load_pair(at, first);
      load_pair(at + kPairBytes<V>, second);
#pragma GCC unroll 6
      for (int r = 0; r < kPairs; ++r) {
        const auto four = [&](int m) __attribute__((always_inline)) {
          return vreinterpret_u64_u8(vld1_u8(reinterpret_cast<const uint8_t*>(
              static_cast<const uint32_t*>(rows[m < M ? m : M - 1]) + pair)));
        };
        inputs[r] = vcombine_u64(four(2 * r), four(2 * r + 1));
      }
      add_products(first, second, inputs, products);
    }
    if (const uint32_t left = block.num_inputs % 4; left != 0) {
      load_pair_of(at, left, first);
      load_pair_of(at + kPairBytes<V>, left > 2 ? left - 2 : 0, second);
      for (int r = 0; r < kPairs; ++r) {
        const auto four = [&](int m) {
          const void* row = rows[m < M ? m : M - 1];
          return vcreate_u64(input_pair_of(row, pair, left) |
                             uint64_t{input_pair_of(row, pair + 1, left > 2 ? left - 2 : 0)} << 32);
        };
        inputs[r] = vcombine_u64(four(2 * r), four(2 * r + 1));
      }
      add_products(first, second, inputs, products);
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const float64x2_t low = vreinterpretq_f64_f32(products[m / 2][2 * h]),
                          high = vreinterpretq_f64_f32(products[m / 2][2 * h + 1]);
        sums[m][h] =
            vreinterpretq_f32_f64(m % 2 == 0 ? vzip1q_f64(low, high) : vzip2q_f64(low, high));
      }
    }
    store_sums<V>(sums, block.first_pair == 0, tile, tile_stride);
  }

  static void store(float32x4_t values, uint16_t* to) {
    const uint16x4_t rounded = round_to_bf16(values);
    __builtin_memcpy(to, &rounded, sizeof(rounded));
  }
};

}  // namespace

constinit const KernelSet kNeonBf16Pairs = make_pair_kernels<V, MatrixProducts>();

}  // namespace dflash::compute
#endif
