// The simulator: threads of a block meet at barriers and shuffles, share memory, run in seeded
// orders; and each of its detectors fires.
// SPDX-License-Identifier: Apache-2.0
#define DFLASH_GPU_SIM 1
#include <doctest/doctest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "cards/portable.h"
#include "cards/sim/block.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using sim::Block;

struct Output {
  uint32_t* values;
  uint32_t bound;
};
const Output& output_of(const void* params) { return *static_cast<const Output*>(params); }

// Runs one block to its end.
Status run(sim::Kernel kernel, const Output& output, uint32_t threads = 64, uint64_t seed = 1) {
  auto block = Block::create(32, seed);
  if (!block.ok()) return std::move(block).error();
  block.value()->start({kernel, &output, "probe", threads, 3, 5, 8});
  for (int turn = 0; turn < 100000; ++turn) {
    auto is_done = block.value()->advance();
    if (!is_done.ok()) return std::move(is_done).error();
    if (is_done.value()) return ok();
  }
  return Error{ErrorCode::kTimeout, "the block never ended"};
}

std::string error_of(sim::Kernel kernel, uint32_t threads = 64) {
  std::vector<uint32_t> values(1024);
  const Status status = run(kernel, {values.data(), 0}, threads);
  return status.ok() ? "none" : status.error().message;
}

TEST_CASE("threads know their place") {
  std::vector<uint32_t> values(256, ~0u);
  REQUIRE(run(
              [](const void* p) {
                output_of(p).values[thread_index()] =
                    block_x() * 1000 + block_y() * 100 + grid_x() * 10 + lane_index();
              },
              {values.data(), 0}, 256)
              .ok());
  for (uint32_t i = 0; i < 256; ++i) CHECK(values[i] == 3000 + 500 + 80 + i % 32);
}

TEST_CASE("after a block barrier every thread sees what all wrote before it") {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    std::vector<uint32_t> values(128, 0);
    REQUIRE(run(
                [](const void* p) {
                  using Array = SharedArray<uint32_t, 128>;
                  GPU_SHARED(Array, shared);
                  shared.at(thread_index()) = thread_index();
                  sync_block();
                  output_of(p).values[thread_index()] = shared.at(127 - thread_index());
                },
                {values.data(), 0}, 128, seed)
                .ok());
    for (uint32_t i = 0; i < 128; ++i) CHECK(values[i] == 127 - i);
  }
}

TEST_CASE("a missing barrier shows: some order of threads reads memory before it is written") {
  std::vector<uint32_t> values(128, 0);
  REQUIRE(run(
              [](const void* p) {
                using Array = SharedArray<uint32_t, 128>;
                GPU_SHARED(Array, shared);
                shared.at(thread_index()) = thread_index();
                output_of(p).values[thread_index()] = shared.at(127 - thread_index());
              },
              {values.data(), 0}, 128)
              .ok());
  uint32_t num_stale = 0;
  for (uint32_t i = 0; i < 128; ++i) num_stale += values[i] == 0xffffffffu ? 1 : 0;
  CHECK(num_stale > 20);
  CHECK(num_stale < 108);
}

// Each sub-group's sum to all, twice in a row; without the last barrier the second round writes
// over sums that others have yet to read.
template <bool kHasLastBarrier>
void sum_twice(const void* params) {
  using Array = SharedArray<uint32_t, 4>;
  GPU_SHARED(Array, sums);
  uint32_t found = 0;
  for (uint32_t round = 1; round <= 2; ++round) {
    const uint32_t of_first = shuffle(round * (subgroup_index() + 1), 0);
    if (lane_index() == 0) sums.at(subgroup_index()) = of_first;
    sync_block();
    for (uint32_t i = 0; i < 4; ++i) found = 100 * found + sums.at(i);
    if constexpr (kHasLastBarrier) sync_block();
  }
  output_of(params).values[thread_index()] = found;
}

TEST_CASE("a missing barrier before memory is written again shows: some sub-group runs ahead") {
  uint32_t num_wrong = 0;
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    std::vector<uint32_t> whole(128), lacking(128);
    REQUIRE(run(&sum_twice<true>, {whole.data(), 0}, 128, seed).ok());
    REQUIRE(run(&sum_twice<false>, {lacking.data(), 0}, 128, seed).ok());
    for (uint32_t i = 0; i < 128; ++i) CHECK(whole[i] == whole[0]);
    num_wrong += lacking != whole ? 1 : 0;
  }
  CHECK(num_wrong >= 1);
  CHECK(num_wrong < 8);  // the other half of the seeds advances all threads together
}

TEST_CASE(
    "two shared objects of one block do not overlap, and a new block starts without the old "
    "contents") {
  std::vector<uint32_t> values(64, 0);
  const sim::Kernel kernel = [](const void* p) {
    using Array = SharedArray<uint32_t, 64>;
    GPU_SHARED(Array, first);
    GPU_SHARED(Array, second);
    output_of(p).values[thread_index()] = first.at(thread_index());
    first.at(thread_index()) = 1;
    second.at(thread_index()) = 2;
    sync_block();
    output_of(p).values[thread_index()] += first.at(63 - thread_index());
  };
  for (int i = 0; i < 2; ++i) {
    REQUIRE(run(kernel, {values.data(), 0}).ok());
    for (uint32_t value : values) CHECK(value == 0);  // 0xffffffff + 1
  }
}

TEST_CASE("shuffles and ballots exchange within 32 lanes, half a wave of 64 too") {
  std::vector<uint32_t> values(128, 0);
  REQUIRE(run(
              [](const void* p) {
                const uint32_t other = shuffle(thread_index(), (lane_index() + 1) % 32);
                const uint32_t votes = ballot(thread_index() % 3 == 0);
                sync_subgroup();
                output_of(p).values[thread_index()] = other * 64 + count_bits(votes);
              },
              {values.data(), 0}, 128)
              .ok());
  for (uint32_t i = 0; i < 128; ++i) {
    uint32_t votes = 0;
    for (uint32_t lane = 0; lane < 32; ++lane) votes += (i / 32 * 32 + lane) % 3 == 0 ? 1 : 0;
    CHECK(values[i] == (i / 32 * 32 + (i + 1) % 32) * 64 + votes);
  }
}

TEST_CASE("the seed changes the order of threads, and the same seed repeats it") {
  const auto order = [](uint64_t seed) {
    std::vector<uint32_t> values(65, 0);
    REQUIRE(
        run([](const void* p) { output_of(p).values[++output_of(p).values[0]] = thread_index(); },
            {values.data(), 0}, 64, seed)
            .ok());
    return values;
  };
  CHECK(order(7) == order(7));
  CHECK(order(7) != order(8));
  CHECK(std::set<std::vector<uint32_t>>{order(1), order(2), order(3), order(4)}.size() == 4);
}

TEST_CASE(
    "a thread that leaves while the others wait for the block is an error that names both and the "
    "line") {
  const std::string error = error_of([](const void*) {
    if (thread_index() == 17) return;
    sync_block();
  });
  CHECK(error == Has{"divergent barrier"});
  CHECK(error == Has{"kernel probe, block (3, 5), thread 0"});
  CHECK(error == Has{"simulator_test.cc:"});
  CHECK(error == Has{"thread 17 has left"});
}

TEST_CASE("threads that wait for the block at two lines are an error that names the lines") {
  const std::string error = error_of([](const void*) {
    if (thread_index() < 32)
      sync_block();
    else
      sync_block();
  });
  CHECK(error == Has{"divergent barrier: thread 0 waits at simulator_test.cc:"});
  CHECK(error == Has{"for the block, but thread 32 waits at simulator_test.cc:"});
}

TEST_CASE("a lane that leaves, or waits for the block, while its sub-group shuffles is an error") {
  CHECK(error_of([](const void*) {
          if (lane_index() != 9) static_cast<void>(shuffle(1, 0));
        }) == Has{"for its sub-group, but thread 9 has left"});
  const std::string error = error_of([](const void*) {
    if (lane_index() == 9)
      sync_block();
    else
      static_cast<void>(ballot(true));
  });
  CHECK(error == Has{"for its sub-group, but thread 9 waits at simulator_test.cc:"});
}

TEST_CASE("an index beyond shared memory's array is an error that names index, size and line") {
  const std::string error = error_of([](const void*) {
    using Array = SharedArray<uint32_t, 48>;
    GPU_SHARED(Array, shared);
    shared.at(thread_index()) = 1;
  });
  CHECK(error == Has{"of 48 elements of shared memory at simulator_test.cc:"});
}

TEST_CASE("more shared memory than a block has is an error") {
  const std::string error = error_of([](const void*) {
    using Array = SharedArray<uint32_t, 13000>;
    GPU_SHARED(Array, shared);
    shared.at(0) = 1;
  });
  CHECK(error == Has{"more than 49152 bytes of shared memory"});
}

TEST_CASE("a block goes on after another one failed") {
  auto block = Block::create(64, 3).value();
  std::vector<uint32_t> values(64, 0);
  const Output output{values.data(), 0};
  block->start(
      {[](const void*) { sim::out_of_bounds(1, 1, {"x.h", 2}); }, &output, "bad", 64, 0, 0, 1});
  CHECK_FALSE(block->advance().ok());
  block->start({[](const void* p) { output_of(p).values[thread_index()] = 7; }, &output, "good", 64,
                0, 0, 1});
  CHECK(block->advance().value());
  for (uint32_t value : values) CHECK(value == 7);
}

TEST_CASE(
    "threads that wait for memory of the host go on once it changes, and let the host run "
    "meanwhile") {
  for (uint64_t seed = 1; seed <= 4; ++seed) {  // both ways of running a block
    auto block = Block::create(32, seed).value();
    uint32_t word = 0;
    const Output output{&word, 0};
    block->start({[](const void* p) {
                    while (load_acquire_system(output_of(p).values) != 5) {
                    }
                  },
                  &output, "wait", 64, 0, 0, 1});
    for (int i = 0; i < 10; ++i) CHECK_FALSE(block->advance().value());
    store_release_system(&word, 5);
    // of two sub-groups, perhaps one at a time
    const bool is_done = block->advance().value() || block->advance().value();
    CHECK(is_done);
  }
}

TEST_CASE("a sub-group that polls for what another writes does not keep it from running") {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    uint32_t word = 0;
    CHECK(run(
              [](const void* p) {
                if (subgroup_index() == 1) store_release_system(output_of(p).values, 1);
                while (load_acquire_system(output_of(p).values) == 0) {
                }
              },
              {&word, 0}, 64, seed)
              .ok());
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
