// The kernels of numerics class bf16-dot for AVX512-BF16. Per output: K in blocks of 256, one chain of VDPBF16PS per block from +0 over
// ascending pairs of inputs, block sums added in ascending order; the layout of weights and rows is bf16_pack.h's. Few rows are bound by
// reading the weights, many rows by the instruction's throughput.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
// A vector type of this file's own: nothing that it instantiates may be linked into code for processors without the instruction.
#define Avx512Vector Avx512Bf16Vector
#include "compute/cpu/vector_avx512.h"

#include "compute/cpu/bf16_pack.h"
#include "compute/cpu/expert_tiles.h"

namespace dflash::compute {
namespace {

using V = Avx512Bf16Vector;
constexpr int kWidth = kPanelWidth<V>;
constexpr size_t kWordBytes = size_t{4} * kWidth;  // of one pair of inputs of a whole panel

[[gnu::always_inline]] inline __m512 dot(__m512i weights, __m512i input, __m512 sum) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(weights), reinterpret_cast<__m512bh>(input));
}

[[gnu::always_inline]] inline __m512i broadcast(const void* row, size_t pair) {
  return _mm512_set1_epi32(static_cast<const int32_t*>(row)[pair]);
}

[[gnu::always_inline]] inline void load_pair(const uint8_t* at, __m512i (&words)[2]) {
  words[0] = _mm512_load_si512(at);
  words[1] = _mm512_load_si512(at + 64);
}

// An odd last input: 16 bits per output, the other half of each word zero. So must be the other half of the row's last word.
[[gnu::always_inline]] inline void load_last(const uint8_t* at, __m512i (&words)[2]) {
  words[0] = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at)));
  words[1] = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(at + 32)));
}

template <bool kIsLast = false, int M, int N>
[[gnu::always_inline]] inline void add_products(const __m512i (&words)[2], const void* const (&rows)[M], size_t pair, int first,
                                                __m512 (&sums)[M][N]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    __m512i input = broadcast(rows[m], pair);
    if constexpr (kIsLast) input = _mm512_and_si512(input, _mm512_set1_epi32(0xffff));
    sums[m][first] = dot(words[0], input, sums[m][first]);
    sums[m][first + 1] = dot(words[1], input, sums[m][first + 1]);
  }
}

template <int M, int N>
[[gnu::always_inline]] inline void start(const void* const* from, const void* (&rows)[M], __m512 (&sums)[M][N]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    rows[m] = from[m];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = _mm512_setzero_ps();
  }
}

// Up to kFewRows rows, as few_rows.h has them; what it calls rows are encoded ones.
struct PairKernel {
  template <int M>
  static constexpr int kPanels = panels_at_once<V>(M);

  template <int M, int NP>
  static void chain(const float* const* encoded, const Streams& streams, uint32_t k_begin, uint32_t k_end, float* tile, size_t tile_stride) {
    __m512 sums[M][2 * NP];
    const void* rows[M];
    start(reinterpret_cast<const void* const*>(encoded), rows, sums);
    const uint8_t* first = streams.first + size_t{2} * kWidth * k_begin;
    const size_t ahead = distance_ahead<kFloatAhead<NP>>(first, streams);
    __m512i words[2];
    size_t pair = k_begin / 2;
    for (; pair < k_end / 2; ++pair, first += kWordBytes) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) {
        const uint8_t* at = first + static_cast<size_t>(p) * streams.panel_bytes;
        prefetch<kWordBytes>(at + ahead);
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

// One K block of one panel: `weights` and the rows' pairs from `first_pair` on. `ahead` bytes are fetched per pair from `next` on.
struct Block {
  const uint8_t* weights;
  uint32_t first_pair;
  uint32_t num_pairs;
  bool has_last;  // an odd input after the pairs
  const uint8_t* next;
  size_t ahead;
};

template <int M>
void block_tile(const void* const* from, const Block& block, float* tile, size_t tile_stride) {
  __m512 sums[M][2];
  const void* rows[M];
  start(from, rows, sums);
  __m512i words[2];
  const uint8_t* at = block.weights;
  const uint8_t* next = block.next;
  const uint32_t end = block.first_pair + block.num_pairs;
  for (size_t pair = block.first_pair; pair < end; ++pair, at += kWordBytes, next += block.ahead) {
    __builtin_prefetch(next, 0, 3);
    if (block.ahead > 64) __builtin_prefetch(next + 64, 0, 3);
    load_pair(at, words);
    add_products(words, rows, pair, 0, sums);
  }
  if (block.has_last) {
    load_last(at, words);
    add_products<true>(words, rows, end, 0, sums);
  }
  store_sums<V>(sums, block.first_pair == 0, tile, tile_stride);
}

void block_tile_of(uint32_t num_rows, const void* const* rows, const Block& block, float* tile, size_t tile_stride) {
  constexpr void (*kTiles[])(const void* const*, const Block&, float*, size_t) = {
      block_tile<1>, block_tile<2>, block_tile<3>, block_tile<4>,  block_tile<5>,  block_tile<6>,
      block_tile<7>, block_tile<8>, block_tile<9>, block_tile<10>, block_tile<11>, block_tile<12>};
  kTiles[num_rows - 1](rows, block, tile, tile_stride);
}

// `num_rows` rows, at most kMaxCallRows: all of them pass over one block of a panel, which stays in the first-level cache.
void run_many_rows(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile) {
  const size_t stride = static_cast<size_t>(run.num_panels) * kWidth;
  const uint32_t num_tiles = (num_rows + V::kMaxTileRows - 1) / V::kMaxTileRows;
  for (uint32_t p = 0; p < run.num_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
    for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
      const uint32_t count = run.num_inputs - k < kChainLength ? run.num_inputs - k : kChainLength;
      Block block{panel + size_t{2} * kWidth * k, k / 2, count / 2, count % 2 != 0, nullptr, 0};
      block.next = block.weights + size_t{2} * kWidth * count;  // the next block follows in memory; each tile fetches its share
      block.ahead = (kWordBytes + num_tiles - 1) / num_tiles;
      for (uint32_t t = 0, row = 0; t < num_tiles; ++t, block.next += count / 2 * block.ahead) {
        const uint32_t size = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
        block_tile_of(size, rows + row, block, tile + row * stride + p * kWidth, stride);
        row += size;
      }
    }
  }
}

// The nearest bf16's, ties to even, as `convert` rounds; VCVTNEPS2BF16 would flush subnormals before it rounds them up.
inline __m256i round_to_bf16(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}

struct PairProducts {
  static constexpr size_t (*kEncodedBytes)(uint32_t) = bf16_row_bytes;
  static constexpr void (*kEncode)(const float*, uint32_t, std::byte*) = encode_bf16_row;
  static constexpr bool kGateUpEncodes = true;

  static void store(__m512 values, void* row, size_t column) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<uint16_t*>(row) + column), round_to_bf16(values));
  }

  static void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile) {
    if (num_rows <= kFewRows) run_few<V, PairKernel>(num_rows, run, reinterpret_cast<const float* const*>(rows), tile);
    else run_many_rows(num_rows, run, rows, tile);
  }
};

constexpr KernelSet with_pair_packing(KernelSet set) {
  set.pack = pack_bf16_pairs;
  return set;
}

}  // namespace

constinit const KernelSet kAvx512Bf16Kernels = with_pair_packing(make_kernel_set<V, PairProducts>());

}  // namespace dflash::compute
#endif
