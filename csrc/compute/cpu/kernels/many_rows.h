// Multiplies more than kFewRows rows with panels. All rows pass over a block of one panel in tiles
// of registers, while it is in the first-level cache. Weights that are dequantised are written
// there as float32 once for all rows; 16-bit floats too where there are many tiles, while few widen
// them in registers. Fma throughput bounds this. Written once over a vector type V; part of
// canonical_products.h, without std:: code for the reason given there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/few_rows.h"

namespace dflash::compute {

// Up to this many tiles, each widens 16-bit floats itself, which is two operations per input. With
// more, a block is widened once. It was chosen by measuring on Sapphire Rapids: up to three tiles
// gain or break even, six lose up to 7 % with AVX-512, and eleven a tenth with AVX2.
inline constexpr uint32_t kWideningTiles = 3;

// Provides weights [k_begin, k_end) of a panel, [input][panel_width], where they are.
template <class V, class W>
struct FloatBlock {
  using Weight = W;
  static const W* provide(const uint8_t* panel, uint32_t k_begin, uint32_t, float*) {
    return reinterpret_cast<const W*>(panel) + static_cast<size_t>(k_begin) * kPanelWidth<V>;
  }
};

// The same as float32, written to `block`, which the caller owns.
template <class V, class W>
struct WidenedBlock {
  using Weight = float;
  static const float* provide(const uint8_t* panel, uint32_t k_begin, uint32_t k_end,
                              float* block) {
    const W* from = FloatBlock<V, W>::provide(panel, k_begin, k_end, nullptr);
    float* to = block;
    for (uint32_t k = k_begin; k < k_end; ++k, from += kPanelWidth<V>, to += kPanelWidth<V>) {
      typename V::F pair[2];
      V::load_weights(from, pair);
      V::store(to, pair[0]);
      V::store(to + V::kLanes, pair[1]);
    }
    return block;
  }
};

// The same for weights in records and groups, read as format Q has them.
template <class V, class Q, WeightFormat kFormat>
struct QuantizedBlock {
  using Weight = float;
  static inline void put(const typename Q::Group& group, const typename Q::Step& step, uint32_t j,
                         float* to) {
    typename V::F pair[2];
    Q::weights(group, step, j, pair);
    V::store(to, pair[0]);
    V::store(to + V::kLanes, pair[1]);
  }
  static const float* provide(const uint8_t* panel, uint32_t k_begin, uint32_t k_end,
                              float* block) {
    constexpr PanelLayout kLayout = panel_layout(kFormat);
    float* to = block;
    for (uint32_t k = k_begin; k < k_end; k += kLayout.group_inputs) {
      const uint8_t* record = QuantizedKernel<V, Q, kFormat>::record_of(panel, k);
      const typename Q::Group group =
          Q::open(record, k % kLayout.record_inputs / kLayout.group_inputs);
      const uint32_t count = k_end - k < kLayout.group_inputs ? k_end - k : kLayout.group_inputs;
      uint32_t s = 0;
      for (; (s + 1) * Q::kStep <= count; ++s) {
        const typename Q::Step step = Q::step(group, s);
#pragma GCC unroll 8
        for (uint32_t j = 0; j < Q::kStep; ++j, to += kPanelWidth<V>) put(group, step, j, to);
      }
      for (uint32_t j = 0; j < count - s * Q::kStep; ++j, to += kPanelWidth<V>)
        put(group, Q::step(group, s), j, to);
    }
    return block;
  }
};

// Inputs of a block, which takes 16 KiB at most: half of the smallest first-level cache in use.
// Where that is not a whole K block, its chains go on from one block to the next.
template <class V, class W>
inline constexpr uint32_t kBlockInputs =
    sizeof(W) * kPanelWidth<V> * kChainLength <= (16u << 10)
        ? kChainLength
        : static_cast<uint32_t>((16u << 10) / (sizeof(W) * kPanelWidth<V>));

// A block of one panel: its weights, and which inputs they meet. Each input also prefetches `step`
// bytes of the weights that come later, from `next` on.
template <class W>
struct FloatPass {
  const W* weights;
  uint32_t k_begin, num_inputs;
  bool ends_chain;
  const uint8_t* next;
  size_t step;
};

// Multiplies M rows with a block. `chains`, [M][panel_width], has their sums while a chain of fmas
// is under way; those of whole chains are added to `tile`.
template <class V, class W, int M>
void block_tile(const float* const* rows, const FloatPass<W>& pass, float* chains, float* tile,
                size_t tile_stride) {
  using F = typename V::F;
  F sums[M][2];
  const float* inputs[M];
  const bool is_begun = pass.k_begin % kChainLength != 0;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    inputs[m] = rows[m] + pass.k_begin;
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n)
      sums[m][n] = is_begun ? V::load(chains + m * kPanelWidth<V> + n * V::kLanes) : V::set1(0.0f);
  }
  const W* weights = pass.weights;
  const uint8_t* next = pass.next;
  const size_t num_inputs = pass.num_inputs, step = pass.step;
  for (size_t k = 0; k < num_inputs; ++k, next += step) {
    __builtin_prefetch(next, 0, 2);
    if (step > 64) __builtin_prefetch(next + 64, 0, 2);
    F pair[2];
    V::load_weights(weights + k * kPanelWidth<V>, pair);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F input = V::set1(inputs[m][k]);
      sums[m][0] = V::fma(pair[0], input, sums[m][0]);
      sums[m][1] = V::fma(pair[1], input, sums[m][1]);
    }
  }
  if (!pass.ends_chain) return store_sums<V>(sums, true, chains, kPanelWidth<V>);
  store_sums<V>(sums, pass.k_begin < kChainLength, tile, tile_stride);
}

template <class V, class W>
void block_tile_of(uint32_t num_rows, const float* const* rows, const FloatPass<W>& pass,
                   float* chains, float* tile, size_t tile_stride) {
#define DFLASH_TILE(M) \
  case M:              \
    return block_tile<V, W, (M) <= V::kMaxTileRows ? (M) : 1>(rows, pass, chains, tile, tile_stride)
  switch (num_rows) {
    DFLASH_TILE(1);
    DFLASH_TILE(2);
    DFLASH_TILE(3);
    DFLASH_TILE(4);
    DFLASH_TILE(5);
    DFLASH_TILE(6);
    DFLASH_TILE(7);
    DFLASH_TILE(8);
    DFLASH_TILE(9);
    DFLASH_TILE(10);
    DFLASH_TILE(11);
    DFLASH_TILE(12);
    default: return;
  }
#undef DFLASH_TILE
}

// Multiplies `num_rows` rows, at most kMaxCallRows, with a run of panels into
// tile [num_rows][num_panels * panel_width].
template <class V, class Block>
void run_many(uint32_t num_rows, const PanelRun& run, const float* const* rows, float* tile) {
  using W = typename Block::Weight;
  constexpr uint32_t kInputs = kBlockInputs<V, W>;
  static_assert(kChainLength % kInputs == 0 && kInputs % 128 == 0, "blocks have whole groups");
  alignas(64) float block[kInputs * kPanelWidth<V>];
  alignas(64) float chains[kMaxCallRows * kPanelWidth<V>];
  constexpr uint32_t kMaxRows = V::kMaxTileRows;
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  const uint32_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  // Bytes of one input of a panel in its resident format, rounded up.
  const size_t input_bytes = (run.panel_bytes + run.num_inputs - 1) / run.num_inputs;
  for (uint32_t p = 0; p < run.num_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
    for (uint32_t k = 0; k < run.num_inputs; k += kInputs) {
      const uint32_t count = run.num_inputs - k < kInputs ? run.num_inputs - k : kInputs;
      const bool ends_chain = (k + kInputs) % kChainLength == 0 || k + count == run.num_inputs;
      // What is needed a K block later lies behind this one in memory; each tile fetches its share.
      FloatPass<W> pass{Block::provide(panel, k, k + count, block),
                        k,
                        count,
                        ends_chain,
                        panel + (k + kChainLength) * input_bytes,
                        (input_bytes + num_tiles - 1) / num_tiles};
      for (uint32_t t = 0, row = 0; t < num_tiles; ++t, pass.next += count * pass.step) {
        const uint32_t size = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
        block_tile_of<V, W>(size, rows + row, pass, chains + row * kPanelWidth<V>,
                            tile + row * stride + p * kPanelWidth<V>, stride);
        row += size;
      }
    }
  }
}

// The same for weights that are floats of any width.
template <class V, class W>
void run_many_floats(uint32_t num_rows, const PanelRun& run, const float* const* rows,
                     float* tile) {
  const bool is_in_place =
      sizeof(W) == sizeof(float) || num_rows <= kWideningTiles * uint32_t{V::kMaxTileRows};
  if (is_in_place) return run_many<V, FloatBlock<V, W>>(num_rows, run, rows, tile);
  run_many<V, WidenedBlock<V, W>>(num_rows, run, rows, tile);
}

}  // namespace dflash::compute
