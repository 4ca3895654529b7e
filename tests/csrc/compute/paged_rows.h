// Random sequences over paged keys and values, for the tests of attention: what a sequence's tokens
// are is fixed by the sequence, and where they lie by the test.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "compute/cpu/kv_layer.h"
#include "compute/cpu/paged_attention.h"
#include "compute/reference/row_operators.h"

namespace dflash::compute {

struct PagedCase {
  uint32_t num_heads = 4, num_kv_heads = 2, key_size = 64, value_size = 64;
  Dtype dtype = Dtype::kF32;
  AttentionForm form{.scale = 0.125f};
};

inline std::vector<float> random_floats(size_t count, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

// The queries, keys and values of all tokens of one sequence.
struct Tokens {
  uint32_t count;
  std::vector<float> queries, keys, values;  // [count][heads * size]

  Tokens(const PagedCase& layer, uint32_t num_tokens, uint32_t seed)
      : count(num_tokens),
        queries(random_floats(size_t{count} * layer.num_heads * layer.key_size, seed)),
        keys(random_floats(size_t{count} * layer.num_kv_heads * layer.key_size, seed + 1000)),
        values(random_floats(size_t{count} * layer.num_kv_heads * layer.value_size, seed + 2000)) {}
};

inline RowsView view_of(const std::vector<float>& rows, uint32_t first, uint32_t count,
                        uint32_t width) {
  return {reinterpret_cast<const std::byte*>(rows.data() + size_t{first} * width), Dtype::kF32,
          width * sizeof(float), count};
}

// Rows of one sequence that are computed, all tokens up to the last of them being stored.
struct ComputedRows {
  const Tokens* tokens;
  std::vector<int32_t> block_table;
  uint32_t first, count;
};

// A layer whose blocks are NaN wherever nothing was stored.
struct PagedLayer {
  PagedCase layer;
  KvLayer kv;

  PagedLayer(const PagedCase& of, uint32_t num_blocks)
      : layer(of),
        kv(KvLayer::create({num_blocks, of.num_kv_heads, of.key_size, of.value_size, of.dtype})
               .value()) {
    const uint32_t count = num_blocks * kBlockTokens;
    std::vector<int64_t> slots(count);
    for (uint32_t i = 0; i < count; ++i) slots[i] = i;
    const uint32_t width = of.num_kv_heads * std::max(of.key_size, of.value_size);
    const std::vector<float> nothing(size_t{count} * width,
                                     std::numeric_limits<float>::quiet_NaN());
    const RowsView rows = view_of(nothing, 0, count, width);
    CHECK(kv.append(slots, rows, rows).ok());
  }

  void store(const Tokens& tokens, const std::vector<int32_t>& block_table, uint32_t first,
             uint32_t end) {
    std::vector<int64_t> slots;
    for (uint32_t i = first; i < end; ++i)
      slots.push_back(int64_t{block_table[i / kBlockTokens]} * kBlockTokens + i % kBlockTokens);
    const Status stored = kv.append(
        slots, view_of(tokens.keys, first, end - first, layer.num_kv_heads * layer.key_size),
        view_of(tokens.values, first, end - first, layer.num_kv_heads * layer.value_size));
    CHECK(stored.ok());
  }
};

struct Step {
  AttentionPlan plan;
  std::vector<float> queries;

  Step(const PagedCase& layer, const std::vector<ComputedRows>& rows) : plan(make_plan(rows)) {
    const size_t width = size_t{layer.num_heads} * layer.key_size;
    for (const ComputedRows& sequence : rows) {
      const auto from =
          sequence.tokens->queries.begin() + static_cast<std::ptrdiff_t>(sequence.first * width);
      queries.insert(queries.end(), from,
                     from + static_cast<std::ptrdiff_t>(sequence.count * width));
    }
  }
  static AttentionPlan make_plan(const std::vector<ComputedRows>& rows) {
    std::vector<SequenceRows> sequences;
    for (const ComputedRows& sequence : rows)
      sequences.push_back({sequence.block_table, sequence.first, sequence.count});
    return AttentionPlan::create(sequences).value();
  }
};

// The bits of all rows of a step in float32, by a kernel set or by the reference.
inline std::vector<uint32_t> attention_bits(const PagedLayer& paged,
                                            const std::vector<ComputedRows>& rows, Isa isa,
                                            uint32_t num_threads = 1) {
  const PagedCase& layer = paged.layer;
  const Step step(layer, rows);
  const uint32_t width = layer.num_heads * layer.value_size;
  std::vector<uint32_t> bits(size_t{step.plan.num_rows()} * width, 0xabababab);
  const RowsView queries =
      view_of(step.queries, 0, step.plan.num_rows(), layer.num_heads * layer.key_size);
  const RowsTarget out{reinterpret_cast<std::byte*>(bits.data()), Dtype::kF32,
                       width * sizeof(float)};
  if (isa == Isa::kReference) {
    reference_attention(paged.kv.view(), step.plan, layer.form, layer.num_heads, queries, out);
    return bits;
  }
  AttentionScratch scratch;
  const auto pool = ThreadPool::create(num_threads, {}, 0);
  const Status done = paged_attention(*pool.value(), isa, paged.kv.view(), step.plan, layer.form,
                                      layer.num_heads, queries, out, scratch);
  CHECK_MESSAGE(done.ok(), (done.ok() ? "" : done.error().message));
  return bits;
}

inline std::vector<int32_t> table_of(uint32_t num_tokens, uint32_t first_block = 0,
                                     int32_t step = 1) {
  std::vector<int32_t> table;
  for (uint32_t i = 0; i < (num_tokens + kBlockTokens - 1) / kBlockTokens; ++i)
    table.push_back(static_cast<int32_t>(first_block) + static_cast<int32_t>(i) * step);
  return table;
}

}  // namespace dflash::compute
