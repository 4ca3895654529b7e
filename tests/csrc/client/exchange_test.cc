// The index arithmetic of a call, against a slow restatement of its rules.
// SPDX-License-Identifier: Apache-2.0
#include "client/exchange.h"
#include "failed.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace dflash::client {
namespace {

struct Routing {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  uint32_t top_k = 1;
};

// Rows of one shard as the rules state them: per token, its pairs there, stably sorted by local id.
ShardRows slow_rows(const Routing& routing, const std::vector<uint32_t>& experts) {
  ShardRows rows;
  for (size_t token = 0; token < routing.ids.size() / routing.top_k; ++token) {
    std::vector<std::pair<uint16_t, float>> pairs;
    for (size_t k = 0; k < routing.top_k; ++k) {
      const size_t at = token * routing.top_k + k;
      const auto found = std::find(experts.begin(), experts.end(), routing.ids[at]);
      if (found != experts.end())
        pairs.emplace_back(static_cast<uint16_t>(found - experts.begin()), routing.weights[at]);
    }
    if (pairs.empty()) continue;
    std::stable_sort(pairs.begin(), pairs.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    rows.tokens.push_back(static_cast<uint32_t>(token));
    rows.row_counts.push_back(static_cast<uint16_t>(pairs.size()));
    for (const auto& [id, weight] : pairs) {
      rows.local_expert_ids.push_back(id);
      rows.weights.push_back(weight);
    }
  }
  return rows;
}

void check_equal(const ShardRows& found, const ShardRows& expected) {
  CHECK(found.tokens == expected.tokens);
  CHECK(found.row_counts == expected.row_counts);
  CHECK(found.local_expert_ids == expected.local_expert_ids);
  CHECK(found.weights == expected.weights);
}

TEST_CASE("random routings with duplicates, sentinels and zero weights give the rules' lists") {
  const std::vector<std::vector<uint32_t>> shards = {
      {0, 3, 9},
      {1},
      {2, 4, 5, 6, 7, 8}
  };
  const ExpertTable table = ExpertTable::build(10, shards).value();
  std::vector<ShardRows> rows(shards.size());
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Routing routing;
    routing.top_k = 1 + static_cast<uint32_t>(random() % 9);
    const size_t count = (random() % 20) * routing.top_k;
    for (size_t i = 0; i < count; ++i) {
      routing.ids.push_back(static_cast<int64_t>(random() % 11));
      routing.weights.push_back(static_cast<float>(random() % 5) - 1.0f);
    }
    REQUIRE(table.exchange<int64_t>(routing.ids, routing.weights, routing.top_k, rows).ok());
    for (size_t s = 0; s < shards.size(); ++s) check_equal(rows[s], slow_rows(routing, shards[s]));
    const std::vector<int32_t> narrow(routing.ids.begin(), routing.ids.end());
    REQUIRE(table.exchange<int32_t>(narrow, routing.weights, routing.top_k, rows).ok());
    for (size_t s = 0; s < shards.size(); ++s) check_equal(rows[s], slow_rows(routing, shards[s]));
  }
}

TEST_CASE("duplicates of an expert stay in top-k order") {
  const ExpertTable table = ExpertTable::build(3,
                                               {
                                                   {0, 1, 2}
  })
                                .value();
  std::vector<ShardRows> rows(1);
  const std::vector<int32_t> ids = {2, 0, 2, 2};
  const std::vector<float> weights = {3, 1, 5, 4};
  REQUIRE(table.exchange<int32_t>(ids, weights, 4, rows).ok());
  CHECK(rows[0].local_expert_ids == std::vector<uint16_t>{0, 2, 2, 2});
  CHECK(rows[0].weights == std::vector<float>{1, 3, 5, 4});
}

TEST_CASE("an id that is no expert and not the sentinel is an error that says where") {
  const ExpertTable table = ExpertTable::build(2,
                                               {
                                                   {0, 1}
  })
                                .value();
  std::vector<ShardRows> rows(1);
  const std::vector<float> weights(4, 1.0f);
  for (const int64_t id :
       {int64_t{-7}, int64_t{-1}, int64_t{3}, int64_t{1000000}, int64_t{1} << 32,
        std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    const std::vector<int64_t> ids = {0, 1, 2, id};
    const Status status = table.exchange<int64_t>(ids, weights, 2, rows);
    REQUIRE(status == Failed(ErrorCode::kInvalidArgument));
    CHECK(status.error().message == "topk_ids[1, 1] is " + std::to_string(id) +
                                        "; allowed are the experts 0..1, and 2 for none");
  }
  const std::vector<int32_t> narrow = {0, 1, 2, -2};
  CHECK(!table.exchange<int32_t>(narrow, weights, 2, rows).ok());
}

TEST_CASE("the number of experts asks for nothing") {
  const ExpertTable table = ExpertTable::build(2,
                                               {
                                                   {0, 1}
  })
                                .value();
  std::vector<ShardRows> rows(1);
  const std::vector<int64_t> ids = {2, 2, 2};
  const std::vector<float> weights(3, 1.0f);
  REQUIRE(table.exchange<int64_t>(ids, weights, 3, rows).ok());
  CHECK(rows[0].tokens.empty());
}

TEST_CASE("a plan must put every expert into exactly one shard, in ascending order") {
  using Shards = std::vector<std::vector<uint32_t>>;
  CHECK(ExpertTable::build(3,
                           Shards{
                               {0, 2},
                               {1}
  })
            .ok());
  CHECK(ExpertTable::build(3,
                           Shards{
                               {0, 1}
  })
            .error()
            .message.find("expert 2 is in no shard") != std::string::npos);
  CHECK(ExpertTable::build(3,
                           Shards{
                               {0, 1},
                               {1, 2}
  })
            .error()
            .message.find("expert 1 is in two shards") != std::string::npos);
  CHECK(!ExpertTable::build(3,
                            Shards{
                                {0, 2, 1}
  })
             .ok());
  CHECK(!ExpertTable::build(3,
                            Shards{
                                {0, 1, 1, 2}
  })
             .ok());
  CHECK(!ExpertTable::build(3,
                            Shards{
                                {0, 1, 2, 3}
  })
             .ok());
  CHECK(!ExpertTable::build(3,
                            Shards{
                                {0, 1, 2},
                                {}
  })
             .ok());
}

TEST_CASE("slices are even, longer ones first, and cover the call") {
  std::vector<uint32_t> lengths;
  uint32_t begin = 0;
  const uint32_t count = num_slices(4248, 1024);
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t end = slice_end(4248, count, i);
    lengths.push_back(end - begin);
    begin = end;
  }
  CHECK(lengths == std::vector<uint32_t>{850, 850, 850, 849, 849});
  CHECK(num_slices(0xffffffffu, 4096) == 1u << 20);
  for (uint32_t tokens = 1; tokens < 200; ++tokens) {
    for (uint32_t slice = 1; slice < 210; ++slice) {
      const uint32_t ranges = num_slices(tokens, slice);
      uint32_t from = 0;
      for (uint32_t i = 0; i < ranges; ++i) {
        const uint32_t to = slice_end(tokens, ranges, i);
        REQUIRE(to > from);
        REQUIRE(to - from <= slice);
        from = to;
      }
      REQUIRE(from == tokens);
    }
  }
}

}  // namespace
}  // namespace dflash::client
