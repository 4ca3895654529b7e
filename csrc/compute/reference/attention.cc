// Paged attention in the words of operators/attention.h.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/row_operators.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "compute/vector_scalar.h"

namespace dflash::compute {
namespace {

// m, l and o of one tile, or of several that were merged.
struct Partial {
  float largest, sum;
  std::vector<float> outputs;  // [value_size]
};

// One query head and the keys of its sequence.
struct Query {
  const KvView& kv;
  const AttentionForm& form;
  const int32_t* block_table;
  uint32_t kv_head;
  std::vector<float> values;  // [key_size]
};

float widened(const KvShape& shape, const std::byte* block, size_t element) {
  float value;
  widen(shape.dtype, block + element * dtype_bytes(shape.dtype), &value, 1);
  return value;
}

uint32_t block_of(const Query& query, uint32_t position) {
  return static_cast<uint32_t>(query.block_table[position / kBlockTokens]);
}

float score(const Query& query, uint32_t position) {
  const KvShape& shape = query.kv.shape;
  const std::byte* keys = query.kv.key_block(block_of(query, position), query.kv_head);
  float product = 0.0f;
  for (uint32_t begin = 0; begin < shape.key_size; begin += kProductChain) {
    const uint32_t end = std::min(begin + kProductChain, shape.key_size);
    float chain = 0.0f;
    for (uint32_t i = begin; i < end; ++i) {
      const float key = widened(shape, keys, size_t{i} * kBlockTokens + position % kBlockTokens);
      chain = std::fmaf(query.values[i], key, chain);
    }
    product = begin == 0 ? chain : product + chain;
  }
  return attention_score<ScalarVector>(product, query.form);
}

// The keys [begin, end) of one tile.
Partial tile_of(const Query& query, uint32_t begin, uint32_t end) {
  const KvShape& shape = query.kv.shape;
  std::vector<float> weights;
  for (uint32_t position = begin; position < end; ++position)
    weights.push_back(score(query, position));
  Partial tile{weights[0], 0.0f, std::vector<float>(shape.value_size, 0.0f)};
  for (float weight : weights) tile.largest = ScalarVector::max(tile.largest, weight);
  float partials[kTilePartials] = {};
  for (uint32_t position = begin; position < end; ++position) {
    float& weight = weights[position - begin];
    weight = exp<ScalarVector>(weight - tile.largest);
    partials[position % kTilePartials] += weight;
    const std::byte* values = query.kv.value_block(block_of(query, position), query.kv_head);
    const size_t row = size_t{position % kBlockTokens} * shape.value_stride();
    for (uint32_t d = 0; d < shape.value_size; ++d)
      tile.outputs[d] = std::fmaf(weight, widened(shape, values, row + d), tile.outputs[d]);
  }
  tile.sum = partials[0];
  for (uint32_t i = 1; i < kTilePartials; ++i) tile.sum += partials[i];
  return tile;
}

void merge(Partial& merged, const Partial& tile) {
  const float largest = ScalarVector::max(merged.largest, tile.largest);
  const float a = exp<ScalarVector>(merged.largest - largest),
              b = exp<ScalarVector>(tile.largest - largest);
  merged.largest = largest;
  merged.sum = std::fmaf(tile.sum, b, merged.sum * a);
  for (size_t d = 0; d < merged.outputs.size(); ++d)
    merged.outputs[d] = std::fmaf(tile.outputs[d], b, merged.outputs[d] * a);
}

// The output of a query at `position`, in float32.
std::vector<float> attend(const Query& query, uint32_t position, const float* sink) {
  const uint32_t first = first_visible(position, query.form.window);
  Partial merged;
  for (uint32_t tile = first / kTileTokens; tile <= position / kTileTokens; ++tile) {
    const Partial next = tile_of(query, std::max(first, tile * kTileTokens),
                                 std::min(position + 1, (tile + 1) * kTileTokens));
    if (tile == first / kTileTokens)
      merged = next;
    else
      merge(merged, next);
  }
  if (sink != nullptr)
    merge(merged, {*sink, 1.0f, std::vector<float>(merged.outputs.size(), 0.0f)});
  for (float& output : merged.outputs) output = ScalarVector::canonical_nan(output / merged.sum);
  return merged.outputs;
}

}  // namespace

void reference_attention(const KvView& kv, const AttentionPlan& plan, const AttentionForm& form,
                         uint32_t num_heads, const RowsView& queries, const RowsTarget& out) {
  const CanonicalFloatMode mode;
  const KvShape& shape = kv.shape;
  const uint32_t group = num_heads / shape.num_kv_heads;
  for (const AttentionPlan::Sequence& sequence : plan.sequences()) {
    for (uint32_t i = 0; i < sequence.num_rows; ++i) {
      const size_t row = size_t{sequence.first_row} + i;
      for (uint32_t head = 0; head < num_heads; ++head) {
        Query query{kv, form, plan.block_table(sequence), head / group,
                    std::vector<float>(shape.key_size)};
        widen(queries.dtype,
              queries.data + row * queries.stride_bytes +
                  size_t{head} * shape.key_size * dtype_bytes(queries.dtype),
              query.values.data(), shape.key_size);
        const float* sink = form.sinks == nullptr ? nullptr : form.sinks + head;
        const std::vector<float> found = attend(query, sequence.first_position + i, sink);
        convert(Dtype::kF32, reinterpret_cast<const std::byte*>(found.data()), out.dtype,
                out.data + row * out.stride_bytes +
                    size_t{head} * shape.value_size * dtype_bytes(out.dtype),
                shape.value_size);
      }
    }
  }
}

}  // namespace dflash::compute
