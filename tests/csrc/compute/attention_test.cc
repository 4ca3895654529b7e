// Paged attention: every kernel set gives the reference's bits, and a row's bits are its own,
// whatever is computed beside it. Whatever no query sees is NaN in every test here.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <cmath>

#include "base/dtype.h"
#include "compute/cpu/attention_split.h"
#include "compute/paged_rows.h"
#include "compute/twins.h"
#include "compute/vector_scalar.h"
#include "failed.h"

namespace dflash::compute {
namespace {

using Bits = std::vector<uint32_t>;

constexpr uint32_t kBlocks = 64;

// Rows [first, first + count) of a sequence, alone in the layer.
Bits bits_of(const PagedCase& layer, const Tokens& tokens, uint32_t first, uint32_t count, Isa isa,
             uint32_t num_threads = 1) {
  PagedLayer paged(layer, kBlocks);
  const std::vector<int32_t> table = table_of(tokens.count, 3);
  paged.store(tokens, table, 0, first + count);
  return attention_bits(paged,
                        {
                            {&tokens, table, first, count}
  },
                        isa, num_threads);
}

void check_all_sets(const PagedCase& layer, uint32_t first, uint32_t count) {
  const Tokens tokens(layer, first + count, 7);
  const Bits expected = bits_of(layer, tokens, first, count, Isa::kReference);
  for (Isa isa : toy::kernel_sets()) {
    CAPTURE(isa_name(isa));
    CHECK(bits_of(layer, tokens, first, count, isa) == expected);
  }
  for (uint32_t bits : expected) CHECK((bits & 0x7fffffff) < 0x7f800000);  // finite
}

TEST_CASE("attention: every kernel set gives the reference's bits for sizes of heads") {
  for (uint32_t size : {40u, 64u, 80u, 96u, 128u, 192u, 256u, 576u}) {
    for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      CAPTURE(size);
      CAPTURE(dtype_name(dtype));
      PagedCase layer{4, 2, size, size == 576 ? 512 : size, dtype};
      check_all_sets(layer, 40, 9);  // many rows on every set, few of one group
      check_all_sets(layer, 285, 1);
    }
  }
}

TEST_CASE("attention: every kernel set gives the reference's bits for values of another size") {
  for (const auto& [key_size, value_size] : {
           std::array{24u,  40u },
           {7u,   3u  },
           {192u, 128u},
           {1u,   1u  }
  }) {
    CAPTURE(key_size);
    check_all_sets({2, 1, key_size, value_size, Dtype::kBF16}, 250, 10);
  }
}

TEST_CASE("attention: every kernel set gives the reference's bits for groups of 1 to 16 heads") {
  for (uint32_t group = 1; group <= 16; ++group) {
    CAPTURE(group);
    check_all_sets({group, 1, 32, 32, Dtype::kBF16}, 270, 1);
    check_all_sets({2 * group, 2, 32, 32, Dtype::kF16}, 252, 8);
  }
}

TEST_CASE("attention: every kernel set gives the reference's bits for windows, sinks and caps") {
  const std::vector<float> sinks = {0.5f, -3.0f, 40.0f, -std::numeric_limits<float>::infinity()};
  for (uint32_t window : {0u, 1u, 2u, 15u, 17u, 256u, 300u}) {
    for (float softcap : {0.0f, 2.0f}) {
      for (bool has_sinks : {false, true}) {
        CAPTURE(window);
        CAPTURE(softcap);
        CAPTURE(has_sinks);
        PagedCase layer{4, 2, 32, 48, Dtype::kBF16};
        layer.form = {0.3f, window, softcap, has_sinks ? sinks.data() : nullptr};
        check_all_sets(layer, 0, 5);
        check_all_sets(layer, 500, 40);
        check_all_sets(layer, 600, 1);
      }
    }
  }
}

TEST_CASE("attention: a row's bits do not depend on how its sequence was cut") {
  PagedCase layer{4, 2, 64, 64, Dtype::kBF16};
  const Tokens tokens(layer, 530, 3);
  const std::vector<int32_t> table = table_of(tokens.count);
  PagedLayer whole(layer, kBlocks);
  whole.store(tokens, table, 0, tokens.count);
  const Bits expected = attention_bits(whole,
                                       {
                                           {&tokens, table, 0, tokens.count}
  },
                                       best_isa());
  for (const std::vector<uint32_t>& cuts : {
           std::vector<uint32_t>{1, 2, 17, 255, 256, 257, 529},
           {100, 400},
           {264}
  }) {
    PagedLayer paged(layer, kBlocks);
    Bits found;
    uint32_t first = 0;
    for (size_t i = 0; i <= cuts.size(); ++i) {
      const uint32_t end = i < cuts.size() ? cuts[i] : tokens.count;
      paged.store(tokens, table, first, end);
      const Bits part = attention_bits(paged,
                                       {
                                           {&tokens, table, first, end - first}
      },
                                       best_isa(), 2);
      found.insert(found.end(), part.begin(), part.end());
      first = end;
    }
    CHECK(found == expected);
  }
}

TEST_CASE("attention: a row's bits do not depend on threads, neighbours or block numbers") {
  PagedCase layer{6, 2, 80, 64, Dtype::kF16};
  const Tokens a(layer, 300, 11), b(layer, 37, 12), c(layer, 290, 13);
  const Bits alone_a = bits_of(layer, a, 299, 1, Isa::kReference),
             alone_b = bits_of(layer, b, 0, 37, Isa::kReference),
             alone_c = bits_of(layer, c, 270, 20, Isa::kReference);
  Bits expected = alone_a;
  expected.insert(expected.end(), alone_b.begin(), alone_b.end());
  expected.insert(expected.end(), alone_c.begin(), alone_c.end());
  PagedLayer paged(layer, kBlocks);
  // interleaved blocks, one sequence's from the end backwards
  const auto table_a = table_of(a.count, 0, 2), table_b = table_of(b.count, 1, 2),
             table_c = table_of(c.count, kBlocks - 1, -1);
  auto odd_c = table_c;  // not in one direction
  std::swap(odd_c[0], odd_c[5]);
  paged.store(a, table_a, 0, 300);
  paged.store(b, table_b, 0, 37);
  for (Isa isa : toy::kernel_sets()) {
    for (uint32_t threads : {1u, 2u, 3u}) {
      CAPTURE(isa_name(isa));
      CAPTURE(threads);
      paged.store(c, odd_c, 0, 290);
      CHECK(attention_bits(paged,
                           {
                               {&a, table_a, 299, 1 },
                               {&b, table_b, 0,   37},
                               {&c, odd_c,   270, 20}
      },
                           isa, threads) == expected);
    }
  }
}

TEST_CASE("attention: sequences that share blocks have the bits of sequences that do not") {
  PagedCase layer{4, 1, 32, 32, Dtype::kF32};
  Tokens a(layer, 40, 21), b(layer, 40, 22);
  std::copy_n(a.keys.begin(), 32 * 32, b.keys.begin());  // the first two blocks are equal
  std::copy_n(a.values.begin(), 32 * 32, b.values.begin());
  PagedLayer paged(layer, kBlocks);
  std::vector<int32_t> table_b = {5, 9, 2};
  paged.store(a, {5, 9, 7}, 0, 40);
  CHECK(paged.kv.copy_block(7, 2).ok());  // as copy on write does
  paged.store(b, table_b, 32, 40);
  Bits expected = bits_of(layer, a, 30, 10, Isa::kReference);
  const Bits of_b = bits_of(layer, b, 33, 7, Isa::kReference);
  expected.insert(expected.end(), of_b.begin(), of_b.end());
  CHECK(attention_bits(paged,
                       {
                           {&a, {5, 9, 7}, 30, 10},
                           {&b, table_b,   33, 7 }
  },
                       best_isa()) == expected);
}

TEST_CASE("attention: a NaN makes the rows that see it NaN, of one pattern, and no others") {
  PagedCase layer{2, 1, 16, 16, Dtype::kBF16};
  layer.form.window = 20;
  Tokens tokens(layer, 60, 5);
  tokens.keys[30 * 16 + 3] = std::bit_cast<float>(0xffc12345u);
  tokens.values[5 * 16 + 3] = std::numeric_limits<float>::infinity();
  for (Isa isa : toy::kernel_sets()) {
    CAPTURE(isa_name(isa));
    const Bits found = bits_of(layer, tokens, 0, 60, isa);
    for (uint32_t row = 0; row < 60; ++row) {
      const bool sees_key = row >= 30 && row < 50, sees_value = row >= 5 && row < 25;
      for (uint32_t i = 0; i < 32; ++i) {
        const uint32_t bits = found[row * 32 + i];
        if (sees_key)
          CHECK(bits == 0x7fc00000);
        else if (sees_value && i % 16 == 3)
          CHECK(bits == 0x7f800000);
        else
          CHECK((bits & 0x7fffffff) < 0x7f800000);
      }
    }
  }
}

TEST_CASE("attention: outputs are rounded once, and what exceeds a dtype fails naming the row") {
  PagedCase layer{2, 2, 16, 16, Dtype::kF32};
  Tokens tokens(layer, 3, 5);
  const Bits wide = bits_of(layer, tokens, 0, 3, best_isa());
  tokens.values[2 * 32 + 1] = 1e38f;
  PagedLayer paged(layer, 2);
  paged.store(tokens, {0}, 0, 3);
  const Step step(layer, {
                             {&tokens, {0}, 0, 3}
  });
  const auto pool = ThreadPool::create(2, {}, 0);
  AttentionScratch scratch;
  std::vector<uint16_t> halves(3 * 40, 0xabab);
  const Status done =
      paged_attention(*pool.value(), best_isa(), paged.kv.view(), step.plan, layer.form, 2,
                      view_of(step.queries, 0, 3, 32),
                      {reinterpret_cast<std::byte*>(halves.data()), Dtype::kF16, 80}, scratch);
  CHECK(done == Failed(ErrorCode::kRange, "row 2 "));
  for (uint32_t row = 0; row < 2; ++row) {
    for (uint32_t i = 0; i < 40; ++i) {
      const float value = i < 32 ? std::bit_cast<float>(wide[row * 32 + i]) : 0.0f;
      CHECK(halves[row * 40 + i] == (i < 32 ? f32_to_f16(value) : 0xabab));  // a stride is a gap
    }
  }
}

TEST_CASE("attention: arguments that do not fit each other are refused") {
  PagedCase layer{4, 2, 16, 16, Dtype::kF32};
  const Tokens tokens(layer, 40, 5);
  PagedLayer paged(layer, 2);
  const Step step(layer, {
                             {&tokens, {0, 1, 2}, 39, 1}
  });  // block 2 does not exist
  const auto pool = ThreadPool::create(1, {}, 0);
  AttentionScratch scratch;
  std::vector<float> out(64);
  const auto refusal = [&](uint32_t num_heads, uint32_t num_rows) {
    const Status done =
        paged_attention(*pool.value(), best_isa(), paged.kv.view(), step.plan, layer.form,
                        num_heads, view_of(step.queries, 0, num_rows, 64),
                        {reinterpret_cast<std::byte*>(out.data()), Dtype::kF32, 256}, scratch);
    return done.ok() ? "" : done.error().message;
  };
  CHECK(refusal(4, 1) == "the plan has block 2; the layer has 2");
  CHECK(refusal(3, 1) == "3 query heads are no multiple of 2 kv heads");
  CHECK(refusal(4, 2) == "there are 2 queries for a plan of 1 rows");
  const std::vector<int32_t> table = {0, -1};
  const auto plan_refusal = [&](uint32_t first, uint32_t count) {
    const SequenceRows rows{table, first, count};
    return AttentionPlan::create({&rows, 1}).error().message;
  };
  CHECK(plan_refusal(16, 1) == "sequence 0 has block -1");
  CHECK(plan_refusal(30, 3) == "sequence 0 has 2 blocks; 33 tokens need 3");
  CHECK(plan_refusal(3, 0) == "sequence 0 has no rows");
  CHECK(plan_refusal(0x7fffffff, 5) == Has{"beyond 2^31"});
}

TEST_CASE("attention: a split has every tile of every row once, for any number of threads") {
  std::vector<int32_t> table(400);
  const std::vector<SequenceRows> sequences = {
      {table, 6000, 1  },
      {table, 10,   300},
      {table, 255,  2  },
      {table, 3000, 1  }
  };
  const AttentionPlan plan = AttentionPlan::create(sequences).value();
  const KvShape shape{1, 2, 576, 512, Dtype::kBF16};
  for (uint32_t threads : {1u, 2u, 3u, 64u}) {
    AttentionForm form;
    for (form.window = 0; form.window <= 700; form.window += 350) {
      const AttentionSplit split = split_attention(plan, shape, form, 140, threads);
      std::vector<uint32_t> tiles(split.groups.size());
      for (const AttentionTask& task : split.tasks) {
        CHECK(task.first_tile == split.groups[task.group].first_tile + tiles[task.group]);
        tiles[task.group] += task.num_tiles;
      }
      size_t num_rows = 0;
      for (size_t g = 0; g < split.groups.size(); ++g) {
        const RowGroup& group = split.groups[g];
        CHECK(tiles[g] == group.num_tiles);
        CHECK(group.size() <= split.max_rows);
        CHECK(group.first_head / 70 == (group.first_head + group.num_heads - 1) / 70);
        num_rows += group.size();
      }
      CHECK(num_rows == size_t{plan.num_rows()} * 140);
    }
  }
}

TEST_CASE("the hyperbolic tangent is within 2 ulp and keeps signs, infinities and NaN") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(tanh<ScalarVector>(infinity) == 1.0f);
  CHECK(tanh<ScalarVector>(-infinity) == -1.0f);
  CHECK(std::isnan(tanh<ScalarVector>(std::nanf(""))));
  for (float x = 1e-6f; x < 20.0f; x *= 1.0009f) {
    const double exact = std::tanh(static_cast<double>(x));
    const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
    CHECK(std::fabs(static_cast<double>(tanh<ScalarVector>(x)) - exact) <= 2 * ulp);
    CHECK(tanh<ScalarVector>(-x) == -tanh<ScalarVector>(x));
  }
}

}  // namespace
}  // namespace dflash::compute
