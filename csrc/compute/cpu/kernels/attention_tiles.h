// The kernels of paged attention, written once over a vector type V: the products of a tile
// (attention_products.h), its weights, and the weighted sums of its values (attention_values.h).
// Included by operators_<set>.cc only; V is a type of its own per set, so that no two files
// instantiate the same symbol with different instructions. There is no std:: code here, because its
// instantiations could be linked into portable callers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/attention_values.h"

namespace dflash::compute {

// m and l of a row's tile.
struct TileSums {
  float largest, sum;
};

// Turns the products of a row into s for the blocks that it sees, minus infinity where it does not
// see a key, so that such a key's weight is +0. Returns the largest.
template <class V>
float scores_of_row(float* scores, const KeyRange& range, uint32_t begin, uint32_t end,
                    const AttentionForm& form) {
  using F = typename V::F;
  const float nothing = -__builtin_inff();
  F largest = V::set1(nothing);
  const uint32_t whole_begin = (range.begin + kTilePartials - 1) / kTilePartials * kTilePartials,
                 whole_end = range.end / kTilePartials * kTilePartials;
  for (uint32_t j = begin; j < end; j += V::kLanes) {
    const F found = attention_score<V>(V::load(scores + j), form);
    V::store(scores + j, found);
    if (j >= whole_begin && j < whole_end) largest = V::max(largest, found);
  }
  if (whole_begin != begin || whole_end != end) {  // the blocks that are seen in part
    for (uint32_t j = begin; j < range.begin; ++j) scores[j] = nothing;
    for (uint32_t j = range.end; j < end; ++j) scores[j] = nothing;
    for (uint32_t j = begin; j < end; j += V::kLanes) {
      if (j < whole_begin || j >= whole_end) largest = V::max(largest, V::load(scores + j));
    }
  }
  float lanes[V::kLanes];
  V::store(lanes, largest);
  float found = lanes[0];
  for (int i = 1; i < V::kLanes; ++i) found = found > lanes[i] ? found : lanes[i];
  return found;
}

// Turns the products of a row into its weights p. A weight of +0 leaves a partial sum as it is, so
// that the vectors may hold keys that the row does not see.
template <class V>
TileSums weights_of_row(float* scores, const KeyRange& range, const AttentionForm& form) {
  using F = typename V::F;
  constexpr uint32_t kVectors = kTilePartials / V::kLanes;
  const uint32_t begin = range.begin / kTilePartials * kTilePartials,
                 end = (range.end + kTilePartials - 1) / kTilePartials * kTilePartials;
  const float largest = scores_of_row<V>(scores, range, begin, end, form);
  F partials[kVectors];
  for (uint32_t i = 0; i < kVectors; ++i) partials[i] = V::set1(0.0f);
  for (uint32_t j = begin; j < end; j += kTilePartials) {
    for (uint32_t i = 0; i < kVectors; ++i) {
      float* at = scores + j + i * V::kLanes;
      const F weights = exp<V>(V::sub(V::load(at), V::set1(largest)));
      V::store(at, weights);
      partials[i] = V::add(partials[i], weights);
    }
  }
  float sums[kTilePartials];
  for (uint32_t i = 0; i < kVectors; ++i) V::store(sums + i * V::kLanes, partials[i]);
  for (uint32_t i = 1; i < kTilePartials; ++i) sums[0] += sums[i];
  return {largest, sums[0]};
}

// e^x of one value.
template <class V>
float exp_of(float x) {
  float lanes[V::kLanes];
  V::store(lanes, exp<V>(V::set1(x)));
  return lanes[0];
}

// Merges m and l of a row, and returns how its outputs are merged.
template <class V>
RowMerge merge_sums(const TileSums& tile, float& largest, float& sum) {
  if (sum == 0.0f) {  // a row that has seen a key has 1 at least
    largest = tile.largest;
    sum = tile.sum;
    return {false, true, 0.0f, 1.0f};
  }
  const float both = largest > tile.largest ? largest : tile.largest;
  const RowMerge merge{false, false, exp_of<V>(largest - both), exp_of<V>(tile.largest - both)};
  largest = both;
  float lanes[V::kLanes];
  V::store(lanes, V::fma(V::set1(tile.sum), V::set1(merge.tile_factor),
                         V::set1(sum * merge.former_factor)));
  sum = lanes[0];
  return merge;
}

template <class V>
void merge_outputs(const RowMerge& merge, const float* tile, uint32_t value_stride,
                   float* outputs) {
  if (merge.sees_none) return;
  const typename V::F former = V::set1(merge.former_factor), factor = V::set1(merge.tile_factor);
  for (uint32_t d = 0; d < value_stride; d += V::kLanes) {
    const typename V::F sums = V::load(tile + d);
    V::store(outputs + d,
             merge.is_first ? sums : V::fma(sums, factor, V::mul(V::load(outputs + d), former)));
  }
}

template <class V, class W, int M>
void attend_few(const AttentionTile& tile, const BlockRange& blocks, RowMerge* merges) {
  few_rows_products<V, W, M>(tile, blocks);
  for (uint32_t m = 0; m < M; ++m) {
    merges[m].sees_none = tile.ranges[m].begin >= tile.ranges[m].end;
    if (merges[m].sees_none) continue;
    merges[m] = merge_sums<V>(
        weights_of_row<V>(tile.scores + size_t{m} * kTileTokens, tile.ranges[m], *tile.form),
        tile.state.largest[m], tile.state.sums[m]);
  }
  few_rows_values<V, W, M>(tile, blocks);
  for (uint32_t m = 0; m < M; ++m) {
    const size_t row = size_t{m} * tile.value_stride;
    merge_outputs<V>(merges[m], tile.outputs + row, tile.value_stride, tile.state.outputs + row);
  }
}

template <class V, class W>
void attend_few_of(const AttentionTile& tile, const BlockRange& blocks, RowMerge* merges) {
#define DFLASH_FEW(M) \
  case M: return attend_few<V, W, (M) <= V::kMaxTileRows ? (M) : 1>(tile, blocks, merges)
  switch (tile.num_rows) {
    DFLASH_FEW(1);
    DFLASH_FEW(2);
    DFLASH_FEW(3);
    DFLASH_FEW(4);
    DFLASH_FEW(5);
    DFLASH_FEW(6);
    DFLASH_FEW(7);
    DFLASH_FEW(8);
    DFLASH_FEW(9);
    DFLASH_FEW(10);
    DFLASH_FEW(11);
    DFLASH_FEW(12);
    default: return;
  }
#undef DFLASH_FEW
}

// AttentionKernels::attend for pages of W.
template <class V, class W>
void attend_tile(const AttentionTile& tile) {
  RowMerge merges[kMaxAttentionRows];
  const SharedRange keys = shared_range(tile.ranges, tile.num_rows);
  if (keys.begin >= keys.end) return;
  const BlockRange blocks{keys.begin / kBlockTokens, (keys.end + kBlockTokens - 1) / kBlockTokens};
  if (tile.num_rows <= V::kMaxTileRows) return attend_few_of<V, W>(tile, blocks, merges);
  many_rows_products<V, W>(tile, blocks);
  for (uint32_t m = 0; m < tile.num_rows; ++m) {
    merges[m].sees_none = tile.ranges[m].begin >= tile.ranges[m].end;
    if (merges[m].sees_none) continue;
    merges[m] = merge_sums<V>(
        weights_of_row<V>(tile.scores + size_t{m} * kTileTokens, tile.ranges[m], *tile.form),
        tile.state.largest[m], tile.state.sums[m]);
  }
  many_rows_values<V, W>(tile, blocks, merges);
}

// AttentionKernels::merge.
template <class V>
void merge_states(const AttentionState& tile, uint32_t num_rows, uint32_t value_stride,
                  const AttentionState& into) {
  for (uint32_t m = 0; m < num_rows; ++m) {
    if (tile.sums[m] == 0.0f) continue;  // the row sees no key of the tile
    const size_t row = size_t{m} * value_stride;
    const RowMerge merge =
        merge_sums<V>({tile.largest[m], tile.sums[m]}, into.largest[m], into.sums[m]);
    merge_outputs<V>(merge, tile.outputs + row, value_stride, into.outputs + row);
  }
}

// AttentionKernels::finish.
template <class V>
void finish_rows(const AttentionState& state, uint32_t num_rows, uint32_t value_stride,
                 const float* sinks) {
  using F = typename V::F;
  for (uint32_t m = 0; m < num_rows; ++m) {
    RowMerge merge{true, false, 1.0f, 0.0f};
    if (sinks != nullptr) merge = merge_sums<V>({sinks[m], 1.0f}, state.largest[m], state.sums[m]);
    const F former = V::set1(merge.former_factor), factor = V::set1(merge.tile_factor),
            sum = V::set1(state.sums[m]);
    float* outputs = state.outputs + size_t{m} * value_stride;
    for (uint32_t d = 0; d < value_stride; d += V::kLanes) {
      F output = V::load(outputs + d);
      if (!merge.sees_none) output = V::fma(V::set1(0.0f), factor, V::mul(output, former));
      V::store(outputs + d, V::canonical_nan(V::div(output, sum)));
    }
  }
}

template <class V>
constexpr AttentionKernels make_attention_kernels() {
  return {
      V::kMaxTileRows,
      {attend_tile<V, float>, attend_tile<V, typename V::F16>, attend_tile<V, typename V::BF16>},
      merge_states<V>,
      finish_rows<V>
  };
}

}  // namespace dflash::compute
