// From modes and layers to slots: every slice of the mode fits its slot, errors fit everywhere, and
// the arena is shared fairly where it is short.
// SPDX-License-Identifier: Apache-2.0
#include "client/slot_plan.h"

#include <doctest/doctest.h>

#include "client/cut.h"
#include "failed.h"
#include "wire/limits.h"
#include "wire/payload.h"

namespace dflash::client {
namespace {

constexpr ModeSettings kSettings{1024, 4, 32};
const ShardShape kSmall{64, 32, 8, 4};
const ShardShape kWide{2048, 1024, 8, 64};

SlicePlan slices(Mode mode) { return plan_slices(mode, kSettings).value(); }

uint64_t total(const std::vector<SlotPlan>& plans) {
  uint64_t sum = 0;
  for (const SlotPlan& plan : plans) sum += plan.arena_bytes();
  return sum;
}

TEST_CASE("a mode is slice, window and rows of a slot") {
  CHECK(slices(Mode::kAuto).is_measured());
  CHECK(slices(Mode::kAuto).slice_tokens == 1024);
  CHECK(slices(Mode::kAuto).window >= slices(Mode::kBatched).window);
  CHECK_FALSE(slices(Mode::kBatched).is_measured());
  CHECK(slices(Mode::kStream).slice_tokens == 4);
  CHECK(slices(Mode::kStream).slot_rows == 32);
  CHECK(slices(Mode::kStream).window > slices(Mode::kBatched).window);
}

TEST_CASE("a stream's slice outside of its bounds is refused with both numbers") {
  for (const uint32_t tokens : {0u, 33u}) {
    const auto planned = plan_slices(Mode::kStream, {1024, tokens, 32});
    REQUIRE(!planned.ok());
    CHECK(planned.error().message == Has{std::to_string(tokens)});
    CHECK(planned.error().message == Has{"32"});
  }
  CHECK(parse_mode("batched").value() == Mode::kBatched);
  CHECK(parse_mode("turbo").error().message == Has{"auto, batched, stream"});
}

TEST_CASE("slots hold the widest layer's rows with as many pairs as its routing can give") {
  const ShardShape shards[] = {kSmall, kWide};
  const auto plan = plan_slots(shards, 100, 3, Dtype::kF32, Dtype::kBF16).value();
  LayerPlan wide;
  wide.in_size = 2048;
  wide.out_size = 1024;
  CHECK(plan.request_bytes == (request_message_bytes(wide, 100, 800, Dtype::kF32) + 63) / 64 * 64);
  CHECK(plan.reply_bytes == (reply_message_bytes(wide, 100, Dtype::kBF16) + 63) / 64 * 64);
  CHECK(plan.arena_bytes() == 3 * (plan.request_bytes + plan.reply_bytes));
  CHECK(plan.geometry().num_slots == 3);
}

TEST_CASE("a row's pairs are bounded by the experts of its shard") {
  const ShardShape few = kSmall, many{64, 32, 8, 8};
  CHECK(plan_slots({&few, 1}, 100, 3, Dtype::kF32, Dtype::kF32).value().request_bytes <
        plan_slots({&many, 1}, 100, 3, Dtype::kF32, Dtype::kF32).value().request_bytes);
}

TEST_CASE("an error's text fits the smallest reply slot") {
  const auto plan = plan_slots({&kSmall, 1}, 1, 2, Dtype::kBF16, Dtype::kBF16).value();
  CHECK(plan.reply_bytes >= wire::kFrameHeaderBytes + wire::kMaxErrorPayloadBytes);
  CHECK(plan.request_bytes % 64 == 0);
  CHECK(plan.reply_bytes % 64 == 0);
}

TEST_CASE("rows that no slot can hold are refused, never planned") {
  const ShardShape widest{wire::kMaxRowWidth, wire::kMaxRowWidth, 8, 64};
  CHECK(!plan_slots({&widest, 1}, wire::kMaxRows, 3, Dtype::kF32, Dtype::kF32).ok());
}

TEST_CASE("where the arena is short all workers get fewer rows, and one more would not fit") {
  const std::vector<std::vector<ShardShape>> workers(16, {kWide});
  const SlicePlan batched = slices(Mode::kBatched);
  const auto plans = plan_arena(workers, batched, Dtype::kF32, Dtype::kF32).value();
  REQUIRE(plans.size() == 16);
  CHECK(plans[0].rows < 1024);
  CHECK(plans[0].rows == plans[15].rows);
  CHECK(total(plans) <= kDefaultArenaBytes);
  std::vector<SlotPlan> more;
  for (const auto& own : workers) {
    more.push_back(
        plan_slots(own, plans[0].rows + 1, batched.window + kSpareSlots, Dtype::kF32, Dtype::kF32)
            .value());
  }
  CHECK(total(more) > kDefaultArenaBytes);
}

TEST_CASE("shared_bytes raises the arena and never lowers it") {
  const std::vector<std::vector<ShardShape>> workers(16, {kWide});
  const SlicePlan batched = slices(Mode::kBatched);
  const auto rows = [&](uint64_t shared_bytes) {
    return plan_arena(workers, batched, Dtype::kF32, Dtype::kF32, shared_bytes).value()[0].rows;
  };
  CHECK(rows(1 << 20) == rows(0));
  CHECK(rows(uint64_t{1} << 30) > rows(0));
}

TEST_CASE("an arena without room for one row per slot is refused with what it needs") {
  const ShardShape widest{wire::kMaxRowWidth, wire::kMaxRowWidth, 8, 64};
  const std::vector<std::vector<ShardShape>> workers(400, {widest});
  CHECK(plan_arena(workers, slices(Mode::kBatched), Dtype::kF32, Dtype::kF32) ==
        Failed(ErrorCode::kInvalidArgument, "ipc.shared_bytes"));
}

TEST_CASE("auto gives up its wide window before its full slices") {
  const std::vector<std::vector<ShardShape>> one(1, {kWide}), many(6, {kWide}), crowd(16, {kWide});
  const SlicePlan measured = slices(Mode::kAuto);
  const auto window = [&](const auto& workers) {
    return plan_arena(workers, measured, Dtype::kF32, Dtype::kF32).value()[0].num_slots -
           kSpareSlots;
  };
  CHECK(window(one) == measured.window);
  CHECK(window(many) < measured.window);
  CHECK(plan_arena(many, measured, Dtype::kF32, Dtype::kF32).value()[0].rows == 1024);
  CHECK(window(crowd) == slices(Mode::kBatched).window);
  CHECK(plan_arena(crowd, measured, Dtype::kF32, Dtype::kF32).value()[0].rows < 1024);
}

TEST_CASE("auto takes fewer slots where one row for each slot of its wide window would not fit") {
  const ShardShape widest{wire::kMaxRowWidth, wire::kMaxRowWidth, 1, 1};
  const std::vector<std::vector<ShardShape>> workers(150, {widest});
  const auto plans = plan_arena(workers, slices(Mode::kAuto), Dtype::kF32, Dtype::kF32).value();
  CHECK(plans[0].num_slots == slices(Mode::kBatched).window + kSpareSlots);
  CHECK(total(plans) <= kDefaultArenaBytes);
}

TEST_CASE("a path serves what was planned for smaller slots, and nothing else") {
  const SlotPlan large{9, 8, 6400, 6400}, small{3, 8, 640, 6400};
  CHECK(large.holds(small));
  CHECK(large.holds(large));
  CHECK_FALSE(small.holds(large));
}

}  // namespace
}  // namespace dflash::client
