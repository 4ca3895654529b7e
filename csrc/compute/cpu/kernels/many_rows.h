// Multiplies more than kFewRows rows with panels. A block of one panel (256 inputs) is turned into
// float32 once, small enough for the first-level cache, and all rows pass over it in tiles of
// registers. Fma throughput bounds this. Written once over a vector type V; part of
// canonical_products.h, without std:: code for the reason given there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/few_rows.h"

namespace dflash::compute {

// Provides weights [k_begin, k_end) of a panel as float32 [input][panel_width]: written to `block`,
// or in place where they are float32 already. The caller owns `block`.
template <class V, class W>
struct FloatBlock {
  static const float* expand(const uint8_t* panel, uint32_t k_begin, uint32_t k_end, float* block) {
    const W* from =
        reinterpret_cast<const W*>(panel) + static_cast<size_t>(k_begin) * kPanelWidth<V>;
    for (uint32_t k = k_begin; k < k_end; ++k, from += kPanelWidth<V>, block += kPanelWidth<V>) {
      typename V::F pair[2];
      V::load_weights(from, pair);
      V::store(block, pair[0]);
      V::store(block + V::kLanes, pair[1]);
    }
    return block - static_cast<size_t>(k_end - k_begin) * kPanelWidth<V>;
  }
};
// Float32 weights are used where they are.
template <class V>
struct FloatBlock<V, float> {
  static const float* expand(const uint8_t* panel, uint32_t k_begin, uint32_t, float*) {
    return reinterpret_cast<const float*>(panel) + static_cast<size_t>(k_begin) * kPanelWidth<V>;
  }
};

// The same for weights in records and groups, read as format Q has them.
template <class V, class Q, WeightFormat kFormat>
struct QuantizedBlock {
  static inline void put(const typename Q::Group& group, const typename Q::Step& step, uint32_t j,
                         float* to) {
    typename V::F pair[2];
    Q::weights(group, step, j, pair);
    V::store(to, pair[0]);
    V::store(to + V::kLanes, pair[1]);
  }
  static const float* expand(const uint8_t* panel, uint32_t k_begin, uint32_t k_end, float* block) {
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

// What a tile of rows prefetches of the weights that come next while it computes: `step` bytes for
// each of its inputs, from `from` on.
struct Ahead {
  const uint8_t* from;
  size_t step;
};

// Multiplies M rows with one K block of float32 weights, `num_inputs` long.
template <class V, int M>
void block_tile(const float* const* rows, const float* weights, uint32_t k_begin,
                uint32_t num_inputs, const Ahead& ahead, float* tile, size_t tile_stride) {
  using F = typename V::F;
  F sums[M][2];
  const float* inputs[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    inputs[m] = rows[m] + k_begin;
    sums[m][0] = sums[m][1] = V::set1(0.0f);
  }
  const uint8_t* next = ahead.from;
  for (size_t k = 0; k < num_inputs; ++k, next += ahead.step) {
    __builtin_prefetch(next, 0, 2);
    if (ahead.step > 64) __builtin_prefetch(next + 64, 0, 2);
    const F first = V::load(weights + k * kPanelWidth<V>),
            second = V::load(weights + k * kPanelWidth<V> + V::kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F input = V::set1(inputs[m][k]);
      sums[m][0] = V::fma(first, input, sums[m][0]);
      sums[m][1] = V::fma(second, input, sums[m][1]);
    }
  }
  store_sums<V>(sums, k_begin == 0, tile, tile_stride);
}

template <class V>
void block_tile_of(uint32_t num_rows, const float* const* rows, const float* weights,
                   uint32_t k_begin, uint32_t num_inputs, const Ahead& ahead, float* tile,
                   size_t tile_stride) {
#define DFLASH_TILE(M)                                                                         \
  case M:                                                                                      \
    return block_tile<V, (M) <= V::kMaxTileRows ? (M) : 1>(rows, weights, k_begin, num_inputs, \
                                                           ahead, tile, tile_stride)
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

using ExpandFunction = const float* (*)(const uint8_t* panel, uint32_t k_begin, uint32_t k_end,
                                        float* block);

// Multiplies `num_rows` rows, at most kMaxCallRows, with a run of panels into
// tile [num_rows][num_panels * panel_width].
template <class V>
void run_many(uint32_t num_rows, const PanelRun& run, ExpandFunction expand,
              const float* const* rows, float* tile) {
  alignas(64) float block[kChainLength * kPanelWidth<V>];
  constexpr uint32_t kMaxRows = V::kMaxTileRows;
  const size_t stride = static_cast<size_t>(run.num_panels) * kPanelWidth<V>;
  const uint32_t num_tiles = (num_rows + kMaxRows - 1) / kMaxRows;
  // Bytes of one input of a panel in its resident format, rounded up.
  const size_t input_bytes = (run.panel_bytes + run.num_inputs - 1) / run.num_inputs;
  for (uint32_t p = 0; p < run.num_panels; ++p) {
    const uint8_t* panel = reinterpret_cast<const uint8_t*>(run.first) + p * run.panel_bytes;
    for (uint32_t k = 0; k < run.num_inputs; k += kChainLength) {
      const uint32_t count = run.num_inputs - k < kChainLength ? run.num_inputs - k : kChainLength;
      const float* weights = expand(panel, k, k + count, block);
      // The next block follows this one in memory; each tile fetches its share.
      Ahead ahead{panel + (k + count) * input_bytes, (input_bytes + num_tiles - 1) / num_tiles};
      for (uint32_t t = 0, row = 0; t < num_tiles; ++t, ahead.from += count * ahead.step) {
        const uint32_t size = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
        block_tile_of<V>(size, rows + row, weights, k, count, ahead,
                         tile + row * stride + p * kPanelWidth<V>, stride);
        row += size;
      }
    }
  }
}

}  // namespace dflash::compute
