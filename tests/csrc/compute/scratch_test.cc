// The memory in which calls compute: who gets which block, when pages go back, and that a batch
// beyond the scratch has the bits of its parts.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "compute/cpu/scratch_pool.h"
#include "failed.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using Blocks = ScratchPool<ScratchBlock>;

constexpr size_t kLarge = Blocks::kKeptBytes + 1;

TEST_CASE("scratch: what came back is lent again, and two loans never share a block") {
  Blocks pool;
  std::byte* first = nullptr;
  {
    const auto loan = pool.lend();
    first = loan->room_for(1000).value();
    const auto other = pool.lend();
    CHECK(&*loan != &*other);
    CHECK(pool.idle_bytes() == 0);
  }
  CHECK(pool.idle_bytes() >= 1000);
  const auto last = pool.lend(), before = pool.lend();
  // The first loan ended last, as destructors run backwards.
  CHECK(last->room_for(1000).value() == first);
  CHECK(before->num_bytes() == 0);
}

TEST_CASE("scratch: a block grows and serves smaller calls from the same memory") {
  ScratchBlock block;
  std::byte* const large = block.room_for(kLarge).value();
  std::memset(large, 1, kLarge);
  CHECK(reinterpret_cast<uintptr_t>(large) % 64 == 0);
  CHECK(block.room_for(10).value() == large);
  CHECK(block.num_bytes() >= kLarge);
  CHECK(block.room_for(SIZE_MAX / 2) == Failed(ErrorCode::kOutOfMemory));
  CHECK(block.room_for(10).ok());
}

// Waits until the condition holds, and fails where it does not within a minute.
template <class Condition>
void await(Condition holds) {
  const Deadline end = Deadline::after_ns(60'000'000'000);
  while (!holds() && !end.has_passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  REQUIRE(holds());
}

TEST_CASE("scratch: large blocks that nobody uses go back to the system, small ones stay") {
  constexpr int64_t kSoonNs = 1'000'000;
  Blocks pool(kSoonNs);
  {
    const auto small = pool.lend(), large = pool.lend();
    REQUIRE(small->room_for(1000).ok());
    REQUIRE(large->room_for(kLarge).ok());
  }
  await([&] { return pool.idle_bytes() < kLarge; });
  CHECK(pool.idle_bytes() >= 1000);
  // The pool goes on lending, and releases again.
  REQUIRE(pool.lend()->room_for(kLarge).ok());
  await([&] { return pool.idle_bytes() < kLarge; });
}

TEST_CASE("scratch: a pool that ends does not wait for what is idle") {
  const int64_t begun = now_ns();
  {
    Blocks pool;
    REQUIRE(pool.lend()->room_for(kLarge).ok());
  }
  CHECK(now_ns() - begun < Blocks::kIdleNs);
}

TEST_CASE("scratch: threads borrow at once and never get each other's block") {
  Blocks pool(1'000);
  std::vector<std::thread> threads;
  std::atomic<bool> is_shared{false};
  for (int t = 1; t <= 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 50; ++i) {
        const auto loan = pool.lend();
        std::byte* const memory = loan->room_for(i % 2 == 0 ? 100 : kLarge).value();
        std::memset(memory, t, 100);
        std::this_thread::yield();
        for (int at = 0; at < 100; ++at)
          if (memory[at] != std::byte(t)) is_shared = true;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_FALSE(is_shared);
}

TEST_CASE("arena: blocks are apart, aligned, zeroed, and stay where the arena ends") {
  std::vector<PageBuffer> blocks;
  std::set<std::byte*> starts;
  {
    PageArena arena;
    // Enough for three regions, with sizes that are no multiple of a line, and one of its own.
    for (int i = 0; i < 60; ++i)
      blocks.push_back(arena.take((size_t{2} << 20) + static_cast<size_t>(i)).value());
    blocks.push_back(arena.take(size_t{40} << 20).value());
    CHECK(arena.take(0).value().data() == nullptr);
    CHECK(arena.take(SIZE_MAX) == Failed(ErrorCode::kOutOfMemory));
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    const PageBuffer& block = blocks[i];
    CHECK(reinterpret_cast<uintptr_t>(block.data()) % 64 == 0);
    CHECK(starts.insert(block.data()).second);
    bool is_zero = true;
    for (size_t at = 0; at < block.num_bytes(); at += 4096)
      is_zero = is_zero && block.data()[at] == std::byte(0);
    CHECK(is_zero);
    std::memset(block.data(), static_cast<int>(i + 1), block.num_bytes());
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    CHECK(blocks[i].data()[0] == std::byte(i + 1));
    CHECK(blocks[i].data()[blocks[i].num_bytes() - 1] == std::byte(i + 1));
  }
}

TEST_CASE("layer: a batch beyond the scratch has the bits of its parts") {
  // So narrow that a row takes some hundred bytes of the scratch.
  const FfnSpec spec = toy::spec_of(8, 8, 8);
  const toy::Experts experts(spec, 2, Dtype::kF32, 31);
  const auto layer = toy::load(best_isa(), experts, WeightFormat::kF32, kDefaultNumerics, 2);
  constexpr uint32_t kRows = 800'000, kHead = 100;
  std::vector<float> rows(size_t{kRows} * 8), reply(rows.size()), alone(size_t{kHead} * 8);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 1009) / 512.0F - 1.0F;
  const std::vector<uint16_t> counts(kRows, 1);
  std::vector<uint16_t> ids(kRows);
  for (uint32_t row = 0; row < kRows; ++row) ids[row] = row % 2;
  const std::vector<float> weights(kRows, 0.75F);
  const auto run = [&](uint32_t first, uint32_t num_rows, std::vector<float>& out) {
    ForwardArgs args;
    args.rows = reinterpret_cast<const std::byte*>(rows.data() + size_t{first} * 8);
    args.num_rows = num_rows;
    args.row_counts = std::span(counts).subspan(first, num_rows);
    args.local_expert_ids = std::span(ids).subspan(first, num_rows);
    args.weights = std::span(weights).subspan(first, num_rows);
    args.reply = reinterpret_cast<std::byte*>(out.data());
    YieldingProgress progress;
    REQUIRE(layer->forward(args, progress).ok());
  };
  run(0, kRows, reply);
  for (uint32_t first : {0U, kRows / 2, kRows * 3 / 4, kRows - kHead}) {
    run(first, kHead, alone);
    CHECK(std::memcmp(alone.data(), reply.data() + size_t{first} * 8, alone.size() * 4) == 0);
  }
}

}  // namespace
}  // namespace dflash::compute
