// The weighted sums of a tile's values: outputs[row][d] = a chain of fmas over the keys that the
// row sees, ascending. Few rows are bound by reading the values, which are widened in registers,
// block by block. With many rows two vectors of all values are widened once, and fma throughput
// bounds them; these are merged into the state straight from the registers. Part of
// attention_tiles.h, and without std:: code for the reason given there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/attention_products.h"

namespace dflash::compute {

// How a row's tile is merged: o' = fma(o_t, tile_factor, o * former_factor), or o_t where it is the
// row's first. Rows that see no key of the tile stay as they are.
struct RowMerge {
  bool sees_none, is_first;
  float former_factor, tile_factor;
};

// The keys that all of some rows see, between those that only some see. All are counted from
// `begin`, the first that one of them sees.
struct SharedRange {
  uint32_t begin, shared_begin, shared_end, end;
};

inline SharedRange shared_range(const KeyRange* ranges, uint32_t num_rows) {
  SharedRange found{kTileTokens, 0, kTileTokens, 0};
  for (uint32_t m = 0; m < num_rows; ++m) {
    if (ranges[m].begin < ranges[m].end) {
      found.begin = least(found.begin, ranges[m].begin);
      found.end = most(found.end, ranges[m].end);
    }
    found.shared_begin = most(found.shared_begin, ranges[m].begin);
    found.shared_end = least(found.shared_end, ranges[m].end);
  }
  found.begin = least(found.begin, found.end);
  found.shared_begin = least(most(found.shared_begin, found.begin), found.end);
  found.shared_end = most(least(found.shared_end, found.end), found.shared_begin);
  return found;
}

// Adds values[k] * weights[m][k] for k in [begin, end) to the sums of M rows, where a row takes the
// keys of its range only: what it does not see may be infinite. `values_of(k)` points to N vectors.
template <class V, int M, int N, class ValuesOf>
[[gnu::always_inline]] inline void add_values(const float* const (&weights)[M],
                                              const KeyRange* ranges, const SharedRange& keys,
                                              const ValuesOf& values_of,
                                              typename V::F (&sums)[M][N]) {
  using F = typename V::F;
  const auto add_key_for_some = [&](size_t k) __attribute__((always_inline)) {
    F values[N];
    const auto* from = values_of(k);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) values[n] = V::load_adjacent(from + n * V::kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      if (k < ranges[m].begin || k >= ranges[m].end) continue;
      const F weight = V::set1(weights[m][k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = V::fma(weight, values[n], sums[m][n]);
    }
  };
  for (size_t k = keys.begin; k < keys.shared_begin; ++k) add_key_for_some(k);
  for (size_t k = keys.shared_begin; k < keys.shared_end; ++k) {
    F values[N];
    const auto* from = values_of(k);
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) values[n] = V::load_adjacent(from + n * V::kLanes);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const F weight = V::set1(weights[m][k]);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = V::fma(weight, values[n], sums[m][n]);
    }
  }
  for (size_t k = keys.shared_end; k < keys.end; ++k) add_key_for_some(k);
}

// N vectors of the outputs of M rows over the keys of one block; `outputs` is AttentionTile's.
template <class V, class W, int M, int N>
void few_values(const AttentionTile& tile, const SharedRange& keys, const W* block,
                const char* ahead, size_t column) {
  using F = typename V::F;
  constexpr size_t kKeyBytes = N * V::kLanes * sizeof(W);  // what this reads for a key
  F sums[M][N];
  const float* weights[M];
  float* outputs = tile.outputs + column;
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    weights[m] = tile.scores + static_cast<size_t>(m) * kTileTokens;
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      sums[m][n] = V::load(outputs + static_cast<size_t>(m) * tile.value_stride + n * V::kLanes);
  }
  const size_t stride = tile.value_stride;
  add_values<V, M, N>(
      weights, tile.ranges, keys,
      [&](size_t k) __attribute__((always_inline)) {
        const size_t token = k % kBlockTokens;
        prefetch<kKeyBytes>(ahead + kBlockTokens * column * sizeof(W) + token * kKeyBytes);
        return block + token * stride + column;
      },
      sums);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n)
      V::store(outputs + static_cast<size_t>(m) * tile.value_stride + n * V::kLanes, sums[m][n]);
  }
}

template <class V, class W, int M>
void few_rows_values(const AttentionTile& tile, const BlockRange& blocks) {
  constexpr int N = vectors_at_once<V>(M);
  const SharedRange all = shared_range(tile.ranges, M);
  const size_t num_vectors = tile.value_stride / V::kLanes;
  for (size_t i = 0; i < M * num_vectors; ++i)
    V::store(tile.outputs + i * V::kLanes, V::set1(0.0f));
  for (uint32_t block = blocks.begin; block < blocks.end; ++block) {
    const uint32_t first = block * kBlockTokens, end = first + kBlockTokens;
    const auto within = [&](uint32_t key) { return least(most(key, first), end); };
    const SharedRange keys{within(all.begin), within(all.shared_begin), within(all.shared_end),
                           within(all.end)};
    const W* values = reinterpret_cast<const W*>(tile.value_blocks[block]);
    const char* ahead = block_ahead(tile, blocks, blocks.end + block - 2 * blocks.begin);
    size_t vector = 0;
    for (; vector + N <= num_vectors; vector += N)
      few_values<V, W, M, N>(tile, keys, values, ahead, vector * V::kLanes);
    if constexpr (N == 4) {
      for (; vector + 2 <= num_vectors; vector += 2)
        few_values<V, W, M, 2>(tile, keys, values, ahead, vector * V::kLanes);
    }
    for (; vector < num_vectors; ++vector)
      few_values<V, W, M, 1>(tile, keys, values, ahead, vector * V::kLanes);
  }
}

// Two vectors of the outputs of M rows over all keys of the tile, merged into `outputs`, of which
// only the first `num_vectors` exist.
template <class V, int M>
void many_values(const float* scores, const KeyRange* ranges, const RowMerge* merges,
                 const float* widened, int num_vectors, float* outputs, size_t stride) {
  using F = typename V::F;
  F sums[M][2];
  const float* weights[M];
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    weights[m] = scores + static_cast<size_t>(m) * kTileTokens;
    sums[m][0] = sums[m][1] = V::set1(0.0f);
  }
  add_values<V, M, 2>(
      weights, ranges, shared_range(ranges, M),
      [&](size_t k) __attribute__((always_inline)) { return widened + k * kPanelWidth<V>; }, sums);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    if (merges[m].sees_none) continue;
    const F former = V::set1(merges[m].former_factor), factor = V::set1(merges[m].tile_factor);
    float* at = outputs + static_cast<size_t>(m) * stride;
#pragma GCC unroll 2
    for (int n = 0; n < 2; ++n) {
      if (n >= num_vectors) continue;
      float* to = at + n * V::kLanes;
      V::store(to, merges[m].is_first ? sums[m][n]
                                      : V::fma(sums[m][n], factor, V::mul(V::load(to), former)));
    }
  }
}

template <class V>
void many_values_of(uint32_t num_rows, const float* scores, const KeyRange* ranges,
                    const RowMerge* merges, const float* widened, int num_vectors, float* outputs,
                    size_t stride) {
#define DFLASH_VALUES(M)                                                                     \
  case M:                                                                                    \
    return many_values<V, (M) <= V::kMaxTileRows ? (M) : 1>(scores, ranges, merges, widened, \
                                                            num_vectors, outputs, stride)
  switch (num_rows) {
    DFLASH_VALUES(1);
    DFLASH_VALUES(2);
    DFLASH_VALUES(3);
    DFLASH_VALUES(4);
    DFLASH_VALUES(5);
    DFLASH_VALUES(6);
    DFLASH_VALUES(7);
    DFLASH_VALUES(8);
    DFLASH_VALUES(9);
    DFLASH_VALUES(10);
    DFLASH_VALUES(11);
    DFLASH_VALUES(12);
    default: return;
  }
#undef DFLASH_VALUES
}

// Widens up to two vectors of the values of `blocks` from `column` on, to [key][2 vectors].
template <class V, class W>
void widen_values(const AttentionTile& tile, const BlockRange& blocks, size_t column,
                  int num_vectors, float* widened) {
  for (uint32_t block = blocks.begin; block < blocks.end; ++block) {
    const W* from = reinterpret_cast<const W*>(tile.value_blocks[block]) + column;
    float* to = widened + size_t{block} * kBlockTokens * kPanelWidth<V>;
    for (uint32_t k = 0; k < kBlockTokens; ++k, from += tile.value_stride, to += kPanelWidth<V>) {
      V::store(to, V::load_adjacent(from));
      V::store(to + V::kLanes,
               num_vectors == 2 ? V::load_adjacent(from + V::kLanes) : V::set1(0.0f));
    }
  }
}

template <class V, class W>
void many_rows_values(const AttentionTile& tile, const BlockRange& blocks, const RowMerge* merges) {
  alignas(64) float widened[kTileTokens * kPanelWidth<V>];
  for (size_t column = 0; column < tile.value_stride; column += kPanelWidth<V>) {
    const int num_vectors = tile.value_stride - column < kPanelWidth<V> ? 1 : 2;
    widen_values<V, W>(tile, blocks, column, num_vectors, widened);
    in_row_tiles<V>(tile.num_rows, [&](uint32_t row, uint32_t size) {
      many_values_of<V>(size, tile.scores + size_t{row} * kTileTokens, tile.ranges + row,
                        merges + row, widened, num_vectors,
                        tile.state.outputs + size_t{row} * tile.value_stride + column,
                        tile.value_stride);
    });
  }
}

}  // namespace dflash::compute
