// The kernels of numerics class bf16-dot for AVX512-BF16. Each output is summed over blocks of 256
// inputs: one chain of VDPBF16PS per block from +0 over ascending pairs of inputs, and the block
// sums added in ascending order. Weights and rows have the layout of pack_bf16_pairs. Few rows
// are bound by reading the weights, many rows by the instruction's throughput.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
// This file gives the vector type a name of its own, so that nothing instantiated here is linked
// into code for processors without the instruction.
#define Avx512Vector Avx512Bf16Vector
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/kernels/bf16_pairs.h"

namespace dflash::compute {
namespace {

using V = Avx512Bf16Vector;
constexpr int kWidth = kPanelWidth<V>;

[[gnu::always_inline]] inline __m512 dot(__m512i weights, __m512i input, __m512 sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights),
                          reinterpret_cast<__m512bh>(input));
}

[[gnu::always_inline]] inline __m512i broadcast(const void* row, size_t pair) {
  return _mm512_set1_epi32(static_cast<const int32_t*>(row)[pair]);
}

[[gnu::always_inline]] inline void load_pair(const uint8_t* at, __m512i (&words)[2]) {
  words[0] = _mm512_load_si512(at);
  words[1] = _mm512_load_si512(at + 64);
}

// Loads an odd last input: 16 bits per output, the other half of each word zero. The caller must
// also clear the other half of the row's last word, since 0 * NaN is not 0.
[[gnu::always_inline]] inline void load_last(const uint8_t* at, __m512i (&words)[2]) {
  words[0] = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
  words[1] = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32)));
}

template <bool kIsLast = false, int M, int N>
[[gnu::always_inline]] inline void add_products(const __m512i (&words)[2],
                                                const void* const (&rows)[M], size_t pair,
                                                int first, __m512 (&sums)[M][N]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    __m512i input = broadcast(rows[m], pair);
    if constexpr (kIsLast) input = _mm512_and_si512(input, _mm512_set1_epi32(0xffff));
    sums[m][first] = dot(words[0], input, sums[m][first]);
    sums[m][first + 1] = dot(words[1], input, sums[m][first + 1]);
  }
}

struct FewRowsKernel {
  template <int M>
  static constexpr int kPanels = panels_at_once<V>(M);

  template <int M, int NP>
  static void chain(const float* const* encoded, const Streams& streams, uint32_t k_begin,
                    uint32_t k_end, float* tile, size_t tile_stride) {
    __m512 sums[M][2 * NP];
    const void* rows[M];
    start_sums<V>(reinterpret_cast<const void* const*>(encoded), rows, sums);
    const uint8_t* first = streams.first + size_t{2} * kWidth * k_begin;
    const size_t ahead = distance_ahead<kFloatAhead<NP>>(first, streams);
    __m512i words[2];
    size_t pair = k_begin / 2;
    for (; pair < k_end / 2; ++pair, first += kPairBytes<V>) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        const uint8_t* at = first + static_cast<size_t>(p) * streams.panel_bytes;
        prefetch<kPairBytes<V>>(at + ahead);
        load_pair(at, words);
        add_products(words, rows, pair, 2 * p, sums);
      }
    }
    if (k_end % 2 != 0) {
      for (int p = 0; p < NP; ++p) {
        load_last(first + static_cast<size_t>(p) * streams.panel_bytes, words);
        add_products<true>(words, rows, pair, 2 * p, sums);
      }
    }
    store_sums<V>(sums, k_begin == 0, tile, tile_stride);
  }
};

// Rounds to the nearest bf16, ties to even, as `convert` does. VCVTNEPS2BF16 would flush subnormals
// to zero before rounding.
inline __m256i round_to_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}

struct DotProducts {
  static constexpr NumericsClass kNumerics = NumericsClass::kBf16Dot;
  static constexpr uint32_t kInputs = 2, kRows = 1;
  using FewRows = FewRowsKernel;

  template <int M>
  static void block_tile(const void* const* from, const PairBlock& block, float* tile,
                         size_t tile_stride) {
    __m512 sums[M][2];
    const void* rows[M];
    start_sums<V>(from, rows, sums);
    __m512i words[2];
    const uint8_t* at = block.weights;
    const uint8_t* next = block.next;
    const uint32_t end = block.first_pair + block.num_inputs / 2;
    for (size_t pair = block.first_pair; pair < end;
         ++pair, at += kPairBytes<V>, next += block.ahead) {
      __builtin_prefetch(next, 0, 3);
      if (block.ahead > 64) __builtin_prefetch(next + 64, 0, 3);
      load_pair(at, words);
      add_products(words, rows, pair, 0, sums);
    }
    if (block.num_inputs % 2 != 0) {
      load_last(at, words);
      add_products<true>(words, rows, end, 0, sums);
    }
    store_sums<V>(sums, block.first_pair == 0, tile, tile_stride);
  }

  static void store(__m512 values, uint16_t* to) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_to_bf16(values));
  }
};

}  // namespace

constinit const KernelSet kAvx512Bf16Pairs = make_pair_kernels<V, DotProducts>();

}  // namespace dflash::compute
#endif
