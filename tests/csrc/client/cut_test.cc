// How a call's rows become requests: every row in exactly one slice, no two slices alike, nothing
// larger than a slot.
// SPDX-License-Identifier: Apache-2.0
#include "client/cut.h"
#include "failed.h"

#include <doctest/doctest.h>

#include <numeric>
#include <string>

namespace dflash::client {
namespace {

constexpr transport::SlotGeometry kLarge{2, 1 << 20, 1 << 20};

Layer one_shard_layer() {
  LayerPlan plan;
  plan.name = "model.layers.0.mlp.experts";
  plan.in_size = plan.out_size = 16;
  plan.num_experts = 8;
  plan.shards = {
      ShardPlace{0, 0, 1, {0, 1, 2, 3, 4, 5, 6, 7}}
  };
  return Layer{plan, ExpertTable::build(8, {plan.shards[0].experts}).value(), {{0}}};
}

// A call whose tokens of odd number have 1 + token % 8 experts and others none.
std::unique_ptr<Call> odd_call(const Layer& layer, uint32_t num_tokens) {
  auto call = std::make_unique<Call>();
  call->layer = &layer;
  call->work = std::make_unique<CallWork>();
  call->work->batch.num_tokens = num_tokens;
  ShardRows& rows = call->work->shard_rows.emplace_back();
  for (uint32_t token = 1; token < num_tokens; token += 2) {
    rows.tokens.push_back(token);
    rows.row_counts.push_back(static_cast<uint16_t>(1 + token % 8));
    rows.local_expert_ids.resize(rows.local_expert_ids.size() + rows.row_counts.back());
  }
  rows.weights.resize(rows.local_expert_ids.size());
  return call;
}

// Slices follow one another without gap, numbers included.
void check_cover(const Call& call) {
  const ShardRows& rows = call.work->shard_rows[0];
  uint32_t row = 0, pair = 0;
  uint16_t slice = 0;
  for (const Slice& cut : call.work->slices) {
    CHECK(cut.index == slice++);
    CHECK(cut.row_begin == row);
    CHECK(cut.pair_begin == pair);
    CHECK(cut.num_rows() > 0);
    pair += std::accumulate(rows.row_counts.begin() + cut.row_begin,
                            rows.row_counts.begin() + cut.row_end, 0u);
    CHECK(cut.pair_end == pair);
    row = cut.row_end;
  }
  CHECK(row == rows.tokens.size());
}

TEST_CASE("a call is cut by tokens, and ranges without rows send nothing") {
  const Layer layer = one_shard_layer();
  const auto call = odd_call(layer, 20);
  const auto splits = cut_shard(*call, 0, 0, {1, kLarge, Dtype::kF32, Dtype::kF32});
  REQUIRE(splits.ok());
  CHECK(splits.value() == 0);
  CHECK(call->work->slices.size() == 10);
  check_cover(*call);
  const auto whole = odd_call(layer, 20);
  REQUIRE(cut_shard(*whole, 0, 0, {20, kLarge, Dtype::kF32, Dtype::kF32}).ok());
  CHECK(whole->work->slices.size() == 1);
  check_cover(*whole);
}

TEST_CASE("slices never exceed either slot, and cuts beyond the policy are counted") {
  const Layer layer = one_shard_layer();
  for (uint64_t request_bytes = 256; request_bytes < 9000; request_bytes += 320) {
    for (uint64_t reply_bytes = 256; reply_bytes < 9000; reply_bytes += 960) {
      const auto call = odd_call(layer, 100);
      const CutLimits limits{
          25, {2, request_bytes, reply_bytes},
           Dtype::kF32, Dtype::kBF16
      };
      const auto splits = cut_shard(*call, 0, 0, limits);
      REQUIRE(splits.ok());
      CHECK(splits.value() == call->work->slices.size() - 4);
      check_cover(*call);
      for (const Slice& cut : call->work->slices) {
        CHECK(request_message_bytes(layer.plan, cut.num_rows(), cut.num_pairs(), Dtype::kF32) <=
              request_bytes);
        CHECK(reply_message_bytes(layer.plan, cut.num_rows(), Dtype::kBF16) <= reply_bytes);
      }
    }
  }
}

TEST_CASE("a row that fits no slot is an error that names the layer and the setting") {
  const Layer layer = one_shard_layer();
  const auto call = odd_call(layer, 4);
  const auto cut = cut_shard(*call, 0, 0,
                             {
                                 4, {2, 128, 4096},
                                  Dtype::kF32, Dtype::kF32
  });
  REQUIRE(cut == Failed(ErrorCode::kInvalidArgument, layer.plan.name, "ipc.shared_bytes"));
}

TEST_CASE("more slices than the header can number are refused, not wrapped around") {
  const Layer layer = one_shard_layer();
  CHECK(cut_shard(*odd_call(layer, 131072), 0, 0, {1, kLarge, Dtype::kF32, Dtype::kF32}).ok());
  const auto cut = cut_shard(*odd_call(layer, 131074), 0, 0, {1, kLarge, Dtype::kF32, Dtype::kF32});
  REQUIRE(!cut.ok());
  CHECK(cut.error().message == Has{"131074 tokens"});
}

}  // namespace
}  // namespace dflash::client
