// What the kernels over pairs of bf16 inputs (pack_bf16_pairs) share, whatever their instruction:
// many rows in tiles over one block of a panel, and the products that expert_tiles.h asks for.
// Everything is written over a vector type V and the part I that belongs to the instruction:
//
//   kInputs             inputs that one step takes
//   kRows               a tile's rows are a multiple of this, except in the last tile
//   FewRows             the kernel of up to kFewRows rows, in the form that few_rows.h has;
//                       its rows are encoded ones
//   block_tile<M>(...)  multiplies M rows with one PairBlock
//   store(values, to)   rounds a vector to bf16, ties to even, as `convert` does
//
// Included by kernels_*.cc only. There is no std:: code here, because the linker could take a copy
// that was compiled for newer processors for everybody's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/expert_tiles.h"
#include "compute/cpu/panels/pack.h"

namespace dflash::compute {

// Bytes of one pair of inputs of a whole panel.
template <class V>
inline constexpr size_t kPairBytes = size_t{4} * kPanelWidth<V>;

// One K block of one panel: its `weights`, and where the rows' pairs begin. Each step also
// prefetches from `next`, which then moves on by `ahead` bytes.
struct PairBlock {
  const uint8_t* weights;
  uint32_t first_pair;
  uint32_t num_inputs;
  const uint8_t* next;
  size_t ahead;
};

// Sets all sums to +0 and copies the M row pointers to where the compiler keeps them in registers.
template <class V, int M, int N>
[[gnu::always_inline]] inline void start_sums(const void* const* from, const void* (&rows)[M],
                                              typename V::F (&sums)[M][N]) {
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    rows[m] = from[m];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = V::set1(0.0f);
  }
}

template <class I>
void block_tile_of(uint32_t num_rows, const void* const* rows, const PairBlock& block, float* tile,
                   size_t tile_stride) {
  constexpr void (*kTiles[])(const void* const*, const PairBlock&, float*, size_t) = {
      I::template block_tile<1>,  I::template block_tile<2>,  I::template block_tile<3>,
      I::template block_tile<4>,  I::template block_tile<5>,  I::template block_tile<6>,
      I::template block_tile<7>,  I::template block_tile<8>,  I::template block_tile<9>,
      I::template block_tile<10>, I::template block_tile<11>, I::template block_tile<12>};
  kTiles[num_rows - 1](rows, block, tile, tile_stride);
}

// Multiplies `num_rows` rows, at most kMaxCallRows, with a run of panels. All rows pass over one
// block of a panel before the next, so that the block stays in the first-level cache.
template <class V, class I>
void run_many_pairs(uint32_t num_rows, const PanelRun& run, const void* const* rows, float* tile) {
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  const uint32_t num_tiles = (num_rows + V::kMaxTileRows - 1) / V::kMaxTileRows;
  const uint32_t tile_rows =
      (num_rows + I::kRows * num_tiles - 1) / (I::kRows * num_tiles) * I::kRows;
  for (uint32_t p = 0; p < run.num_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
    for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
      const uint32_t count = run.num_inputs - k < kChainLength ? run.num_inputs - k : kChainLength;
      PairBlock block{panel + size_t{2} * kPanelWidth<V> * k, k / 2, count, nullptr, 0};
      // The next block follows this one in memory; each tile fetches its share of it.
      block.next = block.weights + size_t{2} * kPanelWidth<V> * count;
      block.ahead = (I::kInputs / 2 * kPairBytes<V> + num_tiles - 1) / num_tiles;
      for (uint32_t row = 0; row < num_rows;
           row += tile_rows, block.next += count / I::kInputs * block.ahead) {
        const uint32_t size = num_rows - row < tile_rows ? num_rows - row : tile_rows;
        block_tile_of<I>(size, rows + row, block, tile + row * stride + p * kPanelWidth<V>, stride);
      }
    }
  }
}

// The products P that expert_tiles.h asks for. Gate and up write encoded rows, because a bf16 row
// can be rounded vector by vector.
template <class V, class I>
struct PairProducts {
  static constexpr NumericsClass kNumerics = I::kNumerics;
  static constexpr size_t (*kEncodedBytes)(uint32_t) = bf16_row_bytes;
  static constexpr void (*kEncode)(const float*, uint32_t, std::byte*) = encode_bf16_row;
  static constexpr bool kGateUpEncodes = true;

  static void store(typename V::F values, void* row, size_t column) {
    I::store(values, static_cast<uint16_t*>(row) + column);
  }

  static void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows,
                       float* tile) {
    if (num_rows <= kFewRows)
      run_few<V, typename I::FewRows>(num_rows, run, reinterpret_cast<const float* const*>(rows),
                                      tile);
    else
      run_many_pairs<V, I>(num_rows, run, rows, tile);
  }
};

template <class V, class I>
constexpr KernelSet make_pair_kernels() {
  KernelSet set = make_kernel_set<V, PairProducts<V, I>>();
  set.pack = pack_bf16_pairs;
  set.unpack = unpack_bf16_pairs;
  return set;
}

}  // namespace dflash::compute
