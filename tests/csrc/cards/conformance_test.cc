// The GPU layer on the simulated device, as CUDA and as HIP: the reference's bits over shapes,
// dtypes, formats, routings and orders of threads; and the refusals that every backend makes.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <thread>

#include "cards/card_scene.h"
#include "cards/host_routing.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;
using toy::Twins;

std::shared_ptr<GpuDevice> device(SimulatedVendor vendor = SimulatedVendor::kCuda,
                                  uint64_t seed = 1, uint64_t memory = kCardBytes) {
  return device_of({vendor, memory, seed});
}

const std::vector<SimulatedVendor> kBoth(std::begin(kVendors), std::end(kVendors));
const toy::Machines kMachines = cards_of(NumericsClass::kF32Canonical, kBoth);

TEST_CASE("both vendors give the reference's bits over shapes and dtypes") {
  const std::vector<toy::Shape> shapes = {
      {1,    1,   1  },
      {7,    5,   3  },
      {64,   33,  65 },
      {255,  96,  130},
      {256,  64,  64 },
      {257,  300, 71 },
      {600,  31,  515},
      {2307, 40,  33 }
  };
  check_shapes(kMachines, shapes, {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kBF16});
}

TEST_CASE(
    "every number of rows gives the reference's bits: few-row tiles, many-row tiles and both in "
    "one batch") {
  const Experts experts(spec_of(300, 70, 100), 3, Dtype::kBF16, 5);
  check_numbers_of_rows(kMachines, experts, Dtype::kBF16,
                        {1, 2, 3, 4, 5, 8, 16, 17, 63, 64, 65, 130});
}

TEST_CASE("lists made on the device give the bits of lists made at the host") {
  const Experts experts(spec_of(64, 32, 40), 5, Dtype::kBF16, 7);
  const Batch small = Batch::random(experts.spec(), 5, 100, 4, 9),
              large = Batch::random(experts.spec(), 5, 400, 4, 9);
  REQUIRE(small.ids.size() <= kMostHostPairs);
  REQUIRE(large.ids.size() > kMostHostPairs);
  const Twins twins(kMachines, experts, Dtype::kBF16);
  twins.check(small);
  twins.check(large);
}

TEST_CASE(
    "lists of more pairs than a block reads in a turn, evenly spread or nearly all of one expert, "
    "give the reference's bits") {
  const Experts experts(spec_of(8, 8, 8), 5, Dtype::kF32, 7);
  const Batch even = Batch::random(experts.spec(), 5, 2100, 8, 9);
  REQUIRE(even.ids.size() > 8192);       // kTurnPairs of kernels/route.h
  REQUIRE(even.ids.size() % 1024 > 32);  // the last turn ends inside a sub-group's pairs
  Batch skewed = even;
  // 0, 1 and 3 have none
  for (size_t i = 0; i < skewed.ids.size(); ++i) skewed.ids[i] = i % 1500 == 7 ? 4 : 2;
  const Twins twins(kMachines, experts, Dtype::kF32);
  twins.check(even);
  twins.check(skewed);
}

TEST_CASE(
    "every activation, gate and bias gives the reference's bits, in the few-row and in the "
    "many-row kernels") {
  check_gates(kMachines, toy::all_activations(), Dtype::kF16, Dtype::kF16);
}

TEST_CASE("every weight format gives the reference's bits") {
  uint32_t seed = 300;
  for (WeightFormat format : kCardFormats)
    check_formats(kMachines, spec_of(512, 256, 70), format, ++seed, {3, 33});
}

TEST_CASE("widths that end inside a chain, a group or a panel give the reference's bits") {
  uint32_t seed = 500;
  for (WeightFormat format : kCardFormats)
    check_formats(kMachines, toy::uneven_spec_of(format), format, ++seed, {3, 33});
}

TEST_CASE(
    "unlike formats of gate, up and down, quantised at load or widened to f32, give the "
    "reference's bits") {
  using enum WeightFormat;
  struct Unlike {
    ResidentFormats held, stored;
  };
  uint32_t seed = 700;
  for (const Unlike& one : {
           Unlike{{kQ4K, kQ6K},     {kQ4K, kQ6K}  },
           {{kF32, kInt4G32}, {kQ5K, kF32}  },
           {{kInt8G32, kF32}, {kF16, kMxfp4}}
  }) {
    check_formats(kMachines, spec_of(256, 256, 64), one.held, ++seed, {3, 33}, one.stored);
  }
}

TEST_CASE("no order of threads and blocks changes a bit") {
  const StoredExperts experts(spec_of(520, 100, 70), 4, WeightFormat::kBF16, WeightFormat::kBF16,
                              41);
  const std::vector<SimulatedVendor> six = {kBoth[1], kBoth[0], kBoth[1],
                                            kBoth[0], kBoth[1], kBoth[0]};
  Twins(cards_of(NumericsClass::kF32Canonical, six), experts, WeightFormat::kBF16)
      .check(Batch::random(experts.spec(), 4, 50, 5, 42));
}

TEST_CASE("many experts, most of them without rows, and rows without experts") {
  const Experts experts(spec_of(32, 16, 24), 200, Dtype::kF32, 51);
  const Twins twins(kMachines, experts, Dtype::kF32);
  const Batch batch = Batch::random(experts.spec(), 200, 300, 3, 52);
  twins.check(batch);
  Batch none = batch;
  none.row_counts.assign(none.row_counts.size(), 0);
  none.ids.clear();
  none.weights.clear();
  twins.check(none);
  twins.check(Batch());
}

TEST_CASE("NaN and infinity stay in their own row, as the one canonical NaN") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 31);
  check_special_rows(kMachines, experts, Dtype::kBF16, toy::special_values());
}

TEST_CASE(
    "a value beyond the reply dtype is the reference's error: the first in row order, with its "
    "value") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 61);
  const Twins twins(kMachines, experts, Dtype::kBF16);
  Batch batch = Batch::random(experts.spec(), 3, 20, 3, 62);
  batch.reply_dtype = Dtype::kF16;
  for (uint32_t row : {6u, 7u, 13u}) {
    for (uint32_t i = 0; i < 64; ++i) batch.rows[row * 64 + i] *= 5000.0f;
  }
  twins.check_failure(batch, ErrorCode::kRange);
  batch.reply_dtype = Dtype::kF32;
  twins.check(batch);  // and the layer goes on
}

TEST_CASE(
    "a batch larger than the scratch bound is computed in pieces, to the same bits and the same "
    "error") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 63);
  const Twins twins(card_of_little_scratch(NumericsClass::kF32Canonical), experts, Dtype::kBF16);
  Batch batch = Batch::random(experts.spec(), 3, 70, 3, 64);
  // one row beyond the bound alone
  batch.row_counts[30] = static_cast<uint16_t>(batch.row_counts[30] + 40);
  for (int i = 0; i < 40; ++i) batch.ids.push_back(1), batch.weights.push_back(0.25f);
  twins.check(batch);
  batch.reply_dtype = Dtype::kF16;
  for (uint32_t i = 60 * 64; i < 70 * 64; ++i) batch.rows[i] *= 50000.0f;
  twins.check_failure(batch, ErrorCode::kRange);
}

TEST_CASE("threads that load and compute on one device at once get the bits of one alone") {
  const FfnSpec spec = spec_of(300, 96, 80);
  const Experts experts(spec, 6, Dtype::kBF16, 65);
  const auto reference = make_reference_layer(spec, 6);
  REQUIRE(experts.load_into(*reference).ok());
  const auto on = device();
  const auto ready = layer_on(on, spec, 6, Dtype::kBF16),
             loading = layer_on(on, spec, 6, Dtype::kBF16);
  REQUIRE(experts.load_into(*ready).ok());
  const Batch batch = Batch::random(spec, 6, 20, 3, 66);
  std::vector<std::byte> replies[3];
  std::atomic<uint32_t> num_failed{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    for (auto& reply : replies) num_failed += batch.run(*ready, reply).ok() ? 0 : 1;
  });
  for (uint32_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      YieldingProgress progress{0};
      for (uint32_t id = t; id < 6; id += 2)
        num_failed += loading->load_expert(id, experts.weights(id), progress).ok() ? 0 : 1;
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(num_failed == 0);
  const std::vector<std::byte> expected = reply_of(*reference, batch);
  for (const auto& reply : replies) CHECK(reply == expected);
  CHECK(reply_of(*loading, batch) == expected);
}

TEST_CASE(
    "too little device memory names the shortfall and the largest number of experts that fits") {
  const FfnSpec spec = spec_of(256, 32, 32);
  const uint64_t expert_bytes = GpuLayer::predicted_bytes(spec, 1, WeightFormat::kF32);
  const auto refused = GpuLayer::create(device(SimulatedVendor::kHip, 1, 3 * expert_bytes + 100),
                                        spec, 5, WeightFormat::kF32);
  CHECK(refused == Failed(ErrorCode::kOutOfMemory, "sim-hip 0",
                          std::to_string(2 * expert_bytes - 100) +
                              " more than are free; at most 3 of them fit"));
}

TEST_CASE("memory of a layer is counted, and given back with it") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 2, Dtype::kBF16, 71);
  const auto on = device();
  const uint64_t before = on->free_bytes().value();
  {
    const auto layer = layer_on(on, spec, 2, Dtype::kBF16);
    CHECK(layer->resident_bytes() == 0);
    CHECK(before - on->free_bytes().value() == GpuLayer::predicted_bytes(spec, 2, Dtype::kBF16));
    REQUIRE(experts.load_into(*layer).ok());
    CHECK(layer->resident_bytes() == GpuLayer::predicted_bytes(spec, 2, Dtype::kBF16));
  }
  CHECK(on->free_bytes().value() == before);
}

TEST_CASE(
    "what no backend accepts is refused: experts not loaded, wrong shapes, damaged scales, ids out "
    "of range") {
  const FfnSpec spec = spec_of(256, 256, 64);
  const auto layer = layer_on(device(), spec, 2, WeightFormat::kQ4K);
  StoredExperts experts(spec, 2, WeightFormat::kQ4K, WeightFormat::kQ4K, 81);
  const Batch batch = Batch::random(spec, 2, 4, 3, 82);
  std::vector<std::byte> reply;
  CHECK(batch.run(*layer, reply) == Failed(ErrorCode::kInvalidArgument));
  REQUIRE(experts.load_into(*layer).ok());
  CHECK(batch.run(*layer, reply).ok());
  experts.damage_down(7);
  CHECK(experts.load_into(*layer) == Failed(ErrorCode::kCheckpoint));
  // half loaded is not loaded
  CHECK(batch.run(*layer, reply) == Failed(ErrorCode::kInvalidArgument, "was not loaded"));
  Batch wild = batch;
  wild.ids[0] = 2;
  CHECK(wild.run(*layer, reply) == Failed(ErrorCode::kInvalidArgument));
  const StoredExperts other(spec_of(512, 256, 64), 2, WeightFormat::kQ4K, WeightFormat::kQ4K, 83);
  CHECK(other.load_into(*layer) == Failed(ErrorCode::kInvalidArgument));
}

TEST_CASE(
    "a device that does not finish within the limit is a timeout that names it, and no later call "
    "waits") {
  const FfnSpec spec = spec_of(256, 64, 64);
  const Experts experts(spec, 2, Dtype::kF32, 91);
  const auto on =
      std::make_shared<GpuDevice>(make_simulated_runtime({}).value(), std::chrono::nanoseconds(1));
  const auto layer = layer_on(on, spec, 2, Dtype::kF32);  // a fill ends within the first look
  REQUIRE(experts.load_into(*layer).ok());
  const Batch batch = Batch::random(spec, 2, 8, 3, 92);
  std::vector<std::byte> reply;
  CHECK(batch.run(*layer, reply) ==
        Failed(ErrorCode::kTimeout, "sim-cuda 0 (simulated CUDA device) did not finish"));
  CHECK(batch.run(*layer, reply) == Failed(ErrorCode::kWorkerFailed));
}

}  // namespace
}  // namespace dflash::compute::gpu
