// When slices pay: over slow links, never over fast ones, never beyond what was measured, and not
// for a gain within the noise.
// SPDX-License-Identifier: Apache-2.0
#include "client/slicing.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

namespace dflash::client {
namespace {

constexpr double kRowBytes = 2048, kPairsPerRow = 4, kExperts = 16;

// A worker with these costs, taught by samples of every size from one row to 4,096.
struct Taught {
  Taught(double fixed_link_ns, double ns_per_byte, double ns_per_pair, double ns_per_expert) {
    for (int round = 0; round < 8; ++round) {
      for (double rows = 1; rows <= 4096; rows *= 2) {
        const double experts = expected_experts(kExperts, rows, rows * kPairsPerRow);
        const double bytes = rows * kRowBytes;
        compute.observe({rows * kPairsPerRow, experts,
                         ns_per_pair * rows * kPairsPerRow + ns_per_expert * experts, 0});
        send.observe({bytes, 0, fixed_link_ns + ns_per_byte * bytes, 0});
        receive.observe({bytes, 0, fixed_link_ns + ns_per_byte * bytes, 0});
      }
    }
  }
  Curves curves() const { return {send, compute, receive}; }
  CostCurve send, compute, receive;
};

Chunk chunk_of(uint32_t num_tokens, uint32_t least_slices = 1) {
  Chunk chunk;
  chunk.num_tokens = num_tokens;
  chunk.least_slices = least_slices;
  chunk.rows = num_tokens;
  chunk.pairs = num_tokens * kPairsPerRow;
  chunk.experts = kExperts;
  chunk.request_bytes = chunk.reply_bytes = num_tokens * kRowBytes;
  return chunk;
}

const Taught& slow_link() {  // 25 MB/s, 2 ms: as long on the way as in the kernel
  static const Taught taught(2e6, 40, 10'000, 20'000);
  return taught;
}
const Taught& shared_memory() {
  static const Taught taught(5'000, 0.2, 10'000, 20'000);
  return taught;
}

TEST_CASE("before anything is measured the chunk goes whole") {
  const CostCurve unknown;
  const SliceChoice choice = choose_slices({unknown, unknown, unknown}, chunk_of(4248, 5), 4, 0);
  CHECK(choice.reason == ChoiceReason::kUnmeasured);
  CHECK(choice.taken.num_slices == 5);
}

TEST_CASE("over shared memory no cut is worth it") {
  for (const uint32_t num_tokens : {65u, 512u, 1024u}) {
    const SliceChoice choice = choose_slices(shared_memory().curves(), chunk_of(num_tokens), 4, 0);
    CHECK(choice.taken.num_slices == 1);
    CHECK(choice.reason == ChoiceReason::kWhole);
  }
  CHECK(choose_slices(shared_memory().curves(), chunk_of(4248, 5), 4, 0).taken.num_slices == 5);
}

TEST_CASE("over a slow link slices hide at least four fifths of what could be hidden") {
  const SliceChoice choice = choose_slices(slow_link().curves(), chunk_of(1024), 4, 0);
  CHECK(choice.reason == ChoiceReason::kSliced);
  const double in_turn = choice.send_ns + choice.compute_ns + choice.receive_ns;
  const double ideal = in_turn - std::max({choice.send_ns, choice.compute_ns, choice.receive_ns});
  CHECK((in_turn - choice.taken.ns) / ideal > 0.8);
  CHECK(choice.taken.window >= 3);
}

TEST_CASE("no slice is below 64 tokens or a quarter of the chunk, nor below 16") {
  CHECK(choose_slices(slow_link().curves(), chunk_of(31), 4, 0).reason == ChoiceReason::kSmall);
  for (uint32_t num_tokens = 32; num_tokens <= 2048; num_tokens += 31) {
    const SliceChoice choice = choose_slices(slow_link().curves(), chunk_of(num_tokens), 4, 0);
    const uint32_t least = std::max(16u, std::min(64u, num_tokens / 4));
    CHECK((choice.taken.num_slices == 1 || num_tokens / choice.taken.num_slices >= least));
  }
}

TEST_CASE(
    "a prompt of 64 tokens hides transfer over a slow link, and is whole over shared memory") {
  const SliceChoice far = choose_slices(slow_link().curves(), chunk_of(64), 4, 0);
  CHECK(far.reason == ChoiceReason::kSliced);
  CHECK(far.taken.ns < 0.9 * far.considered[0].ns);
  const SliceChoice near = choose_slices(shared_memory().curves(), chunk_of(64), 4, 0);
  CHECK(near.taken.num_slices == 1);
}

TEST_CASE("the window lets credits come back a quarter earlier than the slowest stage needs them") {
  // 64 rows are 5.24 ms on the link in each direction, the loop is 15.5 ms: three credits would
  // just do, as long as none is late
  const Taught taught(2e6, 40, 1'000, 5'000);
  const SliceForecast one = forecast(taught.curves(), chunk_of(1024), 16, 8);
  const double occupied = 40 * kRowBytes * 64;
  CHECK(one.window == 4);
  CHECK(one.ns < 1.02 * (1024 * kRowBytes * 40 + occupied + 5e6));
  // where computing sets the pace two credits are enough
  CHECK(forecast(shared_memory().curves(), chunk_of(1024), 16, 8).window == 2);
  CHECK(forecast(taught.curves(), chunk_of(1024), 16, 3).window == 3);
}

TEST_CASE("a gain below the hysteresis changes nothing, whichever number is in force") {
  const Chunk chunk = chunk_of(1024);
  const SliceChoice fresh = choose_slices(slow_link().curves(), chunk, 4, 0);
  for (const SliceForecast& other : fresh.considered) {
    if (other.num_slices == 0 || other.ns * kHysteresis > fresh.taken.ns) continue;
    const SliceChoice kept = choose_slices(slow_link().curves(), chunk, 4, other.num_slices);
    CHECK(kept.taken.num_slices == other.num_slices);
  }
}

TEST_CASE("a layer of a few milliseconds is not cut for a fifth of a millisecond") {
  // as long on the way as in the kernel, but all of it short
  const Taught taught(20'000, 1, 250, 20'000);
  const SliceChoice choice = choose_slices(taught.curves(), chunk_of(512), 4, 0);
  CHECK(choice.considered[1].ns < choice.considered[0].ns);
  CHECK(choice.considered[0].ns < 4e6);
  CHECK(
      (choice.considered[0].ns - choice.taken.ns >= kLeastGainNs || choice.taken.num_slices == 1));
}

TEST_CASE("a curve is not believed beyond half of the smallest request it saw") {
  Taught taught(2e6, 40, 10'000, 20'000);
  CostCurve compute;
  compute.observe({1024 * kPairsPerRow, kExperts, 10'000.0 * 1024 * kPairsPerRow, 0});
  const Curves curves{taught.send, compute, taught.receive};
  CHECK(choose_slices(curves, chunk_of(1024), 4, 0).taken.num_slices == 2);
  compute.observe({512 * kPairsPerRow, kExperts, 10'000.0 * 512 * kPairsPerRow, 0});
  CHECK(choose_slices(curves, chunk_of(1024), 4, 2).taken.num_slices == 4);
}

TEST_CASE("weights that cost more to read than the link to cross are read once") {
  const Taught taught(1e5, 4, 1'000, 5'000'000);
  CHECK(choose_slices(taught.curves(), chunk_of(1024), 4, 0).taken.num_slices == 1);
}

TEST_CASE("expected experts rise from those of one row to all") {
  CHECK(expected_experts(16, 1, 4) == doctest::Approx(4));
  CHECK(expected_experts(16, 1000, 4000) == doctest::Approx(16));
  CHECK(expected_experts(16, 4, 16) < 16);
  CHECK(expected_experts(0, 10, 10) == 0);
  // more pairs a row than experts: duplicates
  CHECK(expected_experts(4, 3, 60) == doctest::Approx(4));
}

}  // namespace
}  // namespace dflash::client
