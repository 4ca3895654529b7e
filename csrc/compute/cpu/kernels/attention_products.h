// The products of query rows with the keys of a tile: scores[row][key], without scale. Few rows are
// bound by reading the keys, which are widened in registers. With many rows a step of keys is
// widened once, and fma throughput bounds them. Both perform the chain of operators/attention.h.
// Part of attention_tiles.h, and without std:: code for the reason given there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/attention_kernels.h"
#include "compute/cpu/kernels/many_rows.h"

namespace dflash::compute {

static_assert(kProductChain == kChainLength);  // block_tile is shared with the expert kernels

// The blocks of a tile that some row sees.
struct BlockRange {
  uint32_t begin, end;
};

inline uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Vectors of keys or values that few rows multiply at once: enough independent fmas to hide their
// latency, as far as registers go.
template <class V>
constexpr int vectors_at_once(int num_rows) {
  return 4 * num_rows <= V::kAccumulators ? 4 : 2;
}

// Where N vectors of keys lie: a pointer each, which advances by 16 elements per element of a key.
template <class W, int N>
struct KeyStep {
  const W* vectors[N];
};

// The keys from `token` on. Steps are counted from the tile's first key. What a step has outside of
// `blocks` is read from their first or last instead, stored and never used.
template <class V, class W, int N>
inline KeyStep<W, N> key_step(const AttentionTile& tile, const BlockRange& blocks, uint32_t token) {
  KeyStep<W, N> step;
  for (int n = 0; n < N; ++n) {
    const uint32_t at = token + static_cast<uint32_t>(n * V::kLanes);
    uint32_t block = at / kBlockTokens;
    block = block < blocks.begin ? blocks.begin : block < blocks.end ? block : blocks.end - 1;
    step.vectors[n] = reinterpret_cast<const W*>(tile.key_blocks[block]) + at % kBlockTokens;
  }
  return step;
}

// What few rows prefetch while they read block `index`, counted in the order in which a tile reads
// them: its keys, its values, the next tile's keys. Lines are prefetched in ascending order,
// whatever the order of the reads is, because the processor's own prefetchers follow such a stream:
// on Zen 5 that brought decoding from 0.66 to 0.82 of the speed of a long read. Blocks of 4 KiB
// that lie scattered come at 0.65 of it, which is what a loop that only reads them reaches.
inline const char* block_ahead(const AttentionTile& tile, const BlockRange& blocks,
                               uint32_t index) {
  const uint32_t num_blocks = blocks.end - blocks.begin;
  const std::byte* block = nullptr;
  index += kAheadBlocks;
  if (index < num_blocks)
    block = tile.key_blocks[blocks.begin + index];
  else if (index < 2 * num_blocks)
    block = tile.value_blocks[blocks.begin + index - num_blocks];
  else if (index - 2 * num_blocks < kAheadBlocks)
    block = tile.next_blocks[index - 2 * num_blocks];
  // Where nothing is known, what is in a cache already costs nothing.
  return reinterpret_cast<const char*>(block == nullptr ? tile.key_blocks[blocks.begin] : block);
}

// Blocks that a step of N vectors reads, one at least.
template <class V, int N>
inline constexpr uint32_t kStepBlocks =
    N * V::kLanes < static_cast<int>(kBlockTokens) ? 1 : N * V::kLanes / kBlockTokens;

// Multiplies M rows with N vectors of keys.
template <class V, class W, int M, int N>
void few_products(const float* const* queries, uint32_t key_size, const KeyStep<W, N>& step,
                  const char* const* ahead, float* scores) {
  using F = typename V::F;
  constexpr size_t kElementBytes = N * V::kLanes * sizeof(W);  // what a step reads for an element
  constexpr uint32_t kParts = kStepBlocks<V, N>;
  for (uint32_t begin = 0; begin < key_size; begin += kProductChain) {
    const uint32_t end = key_size - begin < kProductChain ? key_size : begin + kProductChain;
    F sums[M][N];
    const float* inputs[M];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      inputs[m] = queries[m];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) sums[m][n] = V::set1(0.0f);
    }
    // Each part of the elements prefetches one block.
    for (uint32_t part = 0; part < kParts; ++part) {
      const size_t first = size_t{key_size} * part / kParts;
      const size_t stop = least(end, static_cast<uint32_t>(size_t{key_size} * (part + 1) / kParts));
      for (size_t i = first > begin ? first : begin; i < stop; ++i) {
        prefetch<kElementBytes>(ahead[part] + (i - first) * kElementBytes);
        F keys[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) keys[n] = V::load_adjacent(step.vectors[n] + i * kBlockTokens);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const F input = V::set1(inputs[m][i]);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] = V::fma(input, keys[n], sums[m][n]);
        }
      }
    }
    store_sums<V>(sums, begin == 0, scores, kTileTokens);
  }
}

template <class V, class W, int M>
void few_rows_products(const AttentionTile& tile, const BlockRange& blocks) {
  constexpr int N = vectors_at_once<V>(M);
  constexpr uint32_t kStep = static_cast<uint32_t>(N * V::kLanes);
  static_assert(kTileTokens % kStep == 0);  // a step stores no score behind the tile's
  for (uint32_t token = blocks.begin * kBlockTokens / kStep * kStep;
       token < blocks.end * kBlockTokens; token += kStep) {
    const char* ahead[kStepBlocks<V, N>];
    for (uint32_t i = 0; i < kStepBlocks<V, N>; ++i) {
      const uint32_t block = token / kBlockTokens + i;
      ahead[i] = block_ahead(tile, blocks, most(block, blocks.begin) - blocks.begin);
    }
    few_products<V, W, M, N>(tile.queries, tile.key_size, key_step<V, W, N>(tile, blocks, token),
                             ahead, tile.scores + token);
  }
}

// Calls body(first, size) for tiles of at most V::kMaxTileRows rows that differ by one at most.
template <class V, class Body>
[[gnu::always_inline]] inline void in_row_tiles(uint32_t num_rows, const Body& body) {
  constexpr uint32_t kMost = V::kMaxTileRows;
  const uint32_t num_tiles = (num_rows + kMost - 1) / kMost;
  for (uint32_t t = 0, row = 0; t < num_tiles; ++t) {
    const uint32_t size = num_rows / num_tiles + (t < num_rows % num_tiles ? 1 : 0);
    body(row, size);
    row += size;
  }
}

// Multiplies many rows: block_tile of the expert kernels, with keys in the place of outputs.
template <class V, class W>
void many_rows_products(const AttentionTile& tile, const BlockRange& blocks) {
  constexpr uint32_t kStep = kPanelWidth<V>;
  alignas(64) float widened[kProductChain * kPanelWidth<V>];
  for (uint32_t token = blocks.begin * kBlockTokens / kStep * kStep;
       token < blocks.end * kBlockTokens; token += kStep) {
    const KeyStep<W, 2> step = key_step<V, W, 2>(tile, blocks, token);
    for (uint32_t begin = 0; begin < tile.key_size; begin += kProductChain) {
      const uint32_t count =
          tile.key_size - begin < kProductChain ? tile.key_size - begin : kProductChain;
      float* to = widened;
      for (size_t i = begin; i < size_t{begin} + count; ++i, to += kPanelWidth<V>) {
        for (int n = 0; n < 2; ++n) {
          V::store(to + n * V::kLanes, V::load_adjacent(step.vectors[n] + i * kBlockTokens));
        }
      }
      // A pass takes a whole chain, and fetches nothing but its own first line.
      const FloatPass<float> pass{
          widened, begin, count, true, reinterpret_cast<const uint8_t*>(widened), 0};
      in_row_tiles<V>(tile.num_rows, [&](uint32_t row, uint32_t size) {
        block_tile_of<V>(size, tile.queries + row, pass, nullptr,
                         tile.scores + size_t{row} * kTileTokens + token, kTileTokens);
      });
    }
  }
}

}  // namespace dflash::compute
