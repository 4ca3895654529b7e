// The GPU layer on the simulated device, as CUDA and as HIP: the reference's bits over shapes,
// dtypes, formats, routings and orders of threads; and the refusals that every backend makes.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <atomic>
#include <bit>
#include <limits>
#include <thread>

#include "cards/card_scene.h"
#include "cards/host_routing.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::source_of;
using toy::spec_of;
using toy::StoredExperts;

std::shared_ptr<GpuDevice> device(SimulatedVendor vendor = SimulatedVendor::kCuda,
                                  uint64_t seed = 1, uint64_t memory = kCardBytes) {
  return device_of({vendor, memory, seed});
}

TEST_CASE("both vendors give the reference's bits over shapes and dtypes") {
  struct Shape {
    uint32_t in, intermediate, out;
  };
  const Shape shapes[] = {
      {1,    1,   1  },
      {7,    5,   3  },
      {64,   33,  65 },
      {255,  96,  130},
      {256,  64,  64 },
      {257,  300, 71 },
      {600,  31,  515},
      {2307, 40,  33 }
  };
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      const FfnSpec spec = spec_of(shape.in, shape.intermediate, shape.out);
      const Experts experts(spec, 5, dtype, ++seed);
      const auto reference = make_reference_layer(spec, 5);
      REQUIRE(experts.load_into(*reference).ok());
      Batch batch = Batch::random(spec, 5, 9, 4, ++seed);
      batch.row_dtype = static_cast<Dtype>(seed % 3);
      batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
      const std::vector<std::byte> expected = reply_of(*reference, batch);
      for (SimulatedVendor vendor : kVendors) {
        CAPTURE(shape.in);
        CAPTURE(dtype_name(dtype));
        const auto layer = layer_on(device(vendor, seed), spec, 5, dtype);
        REQUIRE(experts.load_into(*layer).ok());
        CHECK(reply_of(*layer, batch) == expected);
      }
    }
  }
}

TEST_CASE(
    "every number of rows gives the reference's bits: few-row tiles, many-row tiles and both in "
    "one batch") {
  const FfnSpec spec = spec_of(300, 70, 100);
  const Experts experts(spec, 3, Dtype::kBF16, 5);
  const auto reference = make_reference_layer(spec, 3);
  REQUIRE(experts.load_into(*reference).ok());
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor), spec, 3, Dtype::kBF16);
    REQUIRE(experts.load_into(*layer).ok());
    for (uint32_t rows : {1u, 2u, 3u, 4u, 5u, 8u, 16u, 17u, 63u, 64u, 65u, 130u}) {
      Batch one = Batch::random(spec, 1, rows, 1, rows);
      one.row_counts.assign(rows, 1);
      one.ids.assign(rows, 1);
      one.weights.assign(rows, 0.75f);
      CAPTURE(rows);
      CHECK(reply_of(*layer, one) == reply_of(*reference, one));
      Batch several = Batch::random(spec, 3, rows, 6, rows);
      // one expert with many, others with few
      for (size_t i = 0; i < several.ids.size(); i += 2) several.ids[i] = 2;
      CHECK(reply_of(*layer, several) == reply_of(*reference, several));
    }
  }
}

TEST_CASE("lists made on the device give the bits of lists made at the host") {
  const FfnSpec spec = spec_of(64, 32, 40);
  const Experts experts(spec, 5, Dtype::kBF16, 7);
  const auto reference = make_reference_layer(spec, 5);
  REQUIRE(experts.load_into(*reference).ok());
  Batch small = Batch::random(spec, 5, 100, 4, 9);
  Batch large = Batch::random(spec, 5, 400, 4, 9);
  REQUIRE(small.ids.size() <= kMostHostPairs);
  REQUIRE(large.ids.size() > kMostHostPairs);
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor), spec, 5, Dtype::kBF16);
    REQUIRE(experts.load_into(*layer).ok());
    for (const Batch* batch : {&small, &large})
      CHECK(reply_of(*layer, *batch) == reply_of(*reference, *batch));
  }
}

TEST_CASE(
    "lists of more pairs than a block reads in a turn, evenly spread or nearly all of one expert, "
    "give the reference's bits") {
  const FfnSpec spec = spec_of(8, 8, 8);
  const Experts experts(spec, 5, Dtype::kF32, 7);
  const auto reference = make_reference_layer(spec, 5);
  REQUIRE(experts.load_into(*reference).ok());
  Batch even = Batch::random(spec, 5, 2100, 8, 9);
  REQUIRE(even.ids.size() > 8192);       // kTurnPairs of kernels/route.h
  REQUIRE(even.ids.size() % 1024 > 32);  // the last turn ends inside a sub-group's pairs
  Batch skewed = even;
  // 0, 1 and 3 have none
  for (size_t i = 0; i < skewed.ids.size(); ++i) skewed.ids[i] = i % 1500 == 7 ? 4 : 2;
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor), spec, 5, Dtype::kF32);
    REQUIRE(experts.load_into(*layer).ok());
    for (const Batch* batch : {&even, &skewed})
      CHECK(reply_of(*layer, *batch) == reply_of(*reference, *batch));
  }
}

TEST_CASE(
    "every activation, gate and bias gives the reference's bits, in the few-row and in the "
    "many-row kernels") {
  uint32_t seed = 100;
  for (int activation = 0; activation <= 7; ++activation) {
    for (int gate = 0; gate <= 2; ++gate) {
      FfnSpec spec = spec_of(40, 50, 60);
      spec.activation = static_cast<Activation>(activation);
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = ++seed % 2 == 0;
      spec.has_down_bias = seed / 2 % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu) spec.alpha = 1.702f, spec.up_offset = 1.0f;
      if (spec.gate != GateKind::kNone && seed % 3 == 0)
        spec.gate_max = 0.5f, spec.up_limit = 0.75f;
      const Experts experts(spec, 2, Dtype::kF16, seed);
      const auto reference = make_reference_layer(spec, 2);
      const auto layer = layer_on(device(kVendors[seed % 2]), spec, 2, Dtype::kF16);
      REQUIRE(experts.load_into(*reference).ok());
      REQUIRE(experts.load_into(*layer).ok());
      for (uint32_t rows : {5u, 40u}) {
        Batch batch = Batch::random(spec, 2, rows, 3, seed);
        for (float& value : batch.rows) value *= 4.0f;  // into the tails of the activations
        CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));
      }
    }
  }
}

// Both vendors against the reference, through few and many rows of two experts.
void check_format(const FfnSpec& spec, ResidentFormats formats, WeightFormat stored_gate_up,
                  WeightFormat stored_down, uint32_t seed) {
  const StoredExperts experts(spec, 2, stored_gate_up, stored_down, seed);
  const auto reference = make_reference_layer(spec, 2, formats);
  const auto layer = layer_on(device(kVendors[seed % 2], seed), spec, 2, formats);
  REQUIRE(experts.load_into(*reference).ok());
  REQUIRE(experts.load_into(*layer).ok());
  for (uint32_t rows : {3u, 33u}) {
    CAPTURE(format_name(formats.gate_up));
    CAPTURE(format_name(formats.down));
    CAPTURE(rows);
    const Batch batch = Batch::random(spec, 2, rows, 3, seed + rows);
    CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));
  }
}

TEST_CASE("every weight format gives the reference's bits") {
  uint32_t seed = 300;
  for (WeightFormat format : kCardFormats) {
    for (int turn = 0; turn < 2; ++turn)
      check_format(spec_of(512, 256, 70), format, source_of(format), source_of(format), ++seed);
  }
}

TEST_CASE("widths that end inside a chain, a group or a panel give the reference's bits") {
  uint32_t seed = 500;
  for (WeightFormat format : kCardFormats) {
    const uint32_t block = format_facts(format).block;
    const FfnSpec spec = block == 256  ? spec_of(768, 256, 33)
                         : block == 32 ? spec_of(288, 96, 33)
                                       : spec_of(301, 77, 33);
    check_format(spec, format, source_of(format), source_of(format), ++seed);
  }
}

TEST_CASE(
    "unlike formats of gate, up and down, quantised at load or widened to f32, give the "
    "reference's bits") {
  const FfnSpec spec = spec_of(256, 256, 64);
  check_format(spec, {WeightFormat::kQ4K, WeightFormat::kQ6K}, WeightFormat::kQ4K,
               WeightFormat::kQ6K, 700);
  check_format(spec, {WeightFormat::kF32, WeightFormat::kInt4G32}, WeightFormat::kQ5K,
               WeightFormat::kF32, 701);
  check_format(spec, {WeightFormat::kInt8G32, WeightFormat::kF32}, WeightFormat::kF16,
               WeightFormat::kMxfp4, 702);
}

TEST_CASE("no order of threads and blocks changes a bit") {
  const FfnSpec spec = spec_of(520, 100, 70);
  const StoredExperts experts(spec, 4, WeightFormat::kBF16, WeightFormat::kBF16, 41);
  const Batch batch = Batch::random(spec, 4, 50, 5, 42);
  std::vector<std::byte> expected;
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    const auto layer = layer_on(device(kVendors[seed % 2], seed), spec, 4, WeightFormat::kBF16);
    REQUIRE(experts.load_into(*layer).ok());
    const std::vector<std::byte> found = reply_of(*layer, batch);
    if (seed == 1) expected = found;
    CHECK(found == expected);
  }
}

TEST_CASE("many experts, most of them without rows, and rows without experts") {
  const FfnSpec spec = spec_of(32, 16, 24);
  const Experts experts(spec, 200, Dtype::kF32, 51);
  const auto reference = make_reference_layer(spec, 200);
  const auto layer = layer_on(device(), spec, 200, Dtype::kF32);
  REQUIRE(experts.load_into(*reference).ok());
  REQUIRE(experts.load_into(*layer).ok());
  const Batch batch = Batch::random(spec, 200, 300, 3, 52);
  CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));
  Batch none = batch;
  none.row_counts.assign(none.row_counts.size(), 0);
  none.ids.clear();
  none.weights.clear();
  CHECK(reply_of(*layer, none) == reply_of(*reference, none));
  Batch empty;
  CHECK(reply_of(*layer, empty).empty());
}

TEST_CASE("NaN and infinity stay in their own row, as the one canonical NaN") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 31);
  const auto reference = make_reference_layer(spec, 3);
  const auto layer = layer_on(device(), spec, 3, Dtype::kBF16);
  REQUIRE(experts.load_into(*reference).ok());
  REQUIRE(experts.load_into(*layer).ok());
  Batch dirty = Batch::random(spec, 3, 20, 3, 32);
  dirty.rows[3 * 64 + 5] = std::bit_cast<float>(0xffabcdefu);  // a negative NaN with a payload
  dirty.rows[7 * 64 + 1] = std::numeric_limits<float>::infinity();
  dirty.rows[11 * 64 + 9] = std::bit_cast<float>(0x7f800001u);  // signalling
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    dirty.reply_dtype = dtype;
    CHECK(reply_of(*layer, dirty) == reply_of(*reference, dirty));
  }
}

TEST_CASE(
    "a value beyond the reply dtype is the reference's error: the first in row order, with its "
    "value") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 61);
  const auto reference = make_reference_layer(spec, 3);
  const auto layer = layer_on(device(), spec, 3, Dtype::kBF16);
  REQUIRE(experts.load_into(*reference).ok());
  REQUIRE(experts.load_into(*layer).ok());
  Batch batch = Batch::random(spec, 3, 20, 3, 62);
  batch.reply_dtype = Dtype::kF16;
  for (uint32_t row : {6u, 7u, 13u}) {
    for (uint32_t i = 0; i < 64; ++i) batch.rows[row * 64 + i] *= 5000.0f;
  }
  std::vector<std::byte> reply;
  const Status expected = batch.run(*reference, reply), found = batch.run(*layer, reply);
  REQUIRE_FALSE(expected.ok());
  REQUIRE_FALSE(found.ok());
  CHECK(found.error().code == ErrorCode::kRange);
  CHECK(found.error().message == expected.error().message);
  batch.reply_dtype = Dtype::kF32;
  CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));  // and the layer goes on
}

TEST_CASE(
    "a batch larger than the scratch bound is computed in pieces, to the same bits and the same "
    "error") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 63);
  const auto reference = make_reference_layer(spec, 3);
  // some 15 pairs
  const auto on = std::make_shared<GpuDevice>(make_simulated_runtime({}).value(),
                                              std::chrono::seconds(100), 16384);
  const auto layer = layer_on(on, spec, 3, Dtype::kBF16);
  REQUIRE(experts.load_into(*reference).ok());
  REQUIRE(experts.load_into(*layer).ok());
  Batch batch = Batch::random(spec, 3, 70, 3, 64);
  // one row beyond the bound alone
  batch.row_counts[30] = static_cast<uint16_t>(batch.row_counts[30] + 40);
  for (int i = 0; i < 40; ++i) batch.ids.push_back(1), batch.weights.push_back(0.25f);
  CHECK(reply_of(*layer, batch) == reply_of(*reference, batch));
  batch.reply_dtype = Dtype::kF16;
  for (uint32_t i = 60 * 64; i < 70 * 64; ++i) batch.rows[i] *= 50000.0f;
  std::vector<std::byte> reply;
  const Status expected = batch.run(*reference, reply), found = batch.run(*layer, reply);
  REQUIRE_FALSE(expected.ok());
  REQUIRE_FALSE(found.ok());
  CHECK(found.error().message == expected.error().message);
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
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kOutOfMemory);
  CHECK(refused.error().message.find("sim-hip 0") != std::string::npos);
  CHECK(refused.error().message.find(std::to_string(2 * expert_bytes - 100) +
                                     " more than are free; at most 3 of them fit") !=
        std::string::npos);
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
  CHECK(batch.run(*layer, reply).error().code == ErrorCode::kInvalidArgument);
  REQUIRE(experts.load_into(*layer).ok());
  CHECK(batch.run(*layer, reply).ok());
  experts.damage_down(7);
  CHECK(experts.load_into(*layer).error().code == ErrorCode::kCheckpoint);
  // half loaded is not loaded
  CHECK(batch.run(*layer, reply).error().message.find("was not loaded") != std::string::npos);
  Batch wild = batch;
  wild.ids[0] = 2;
  CHECK(wild.run(*layer, reply).error().code == ErrorCode::kInvalidArgument);
  const StoredExperts other(spec_of(512, 256, 64), 2, WeightFormat::kQ4K, WeightFormat::kQ4K, 83);
  CHECK(other.load_into(*layer).error().code == ErrorCode::kInvalidArgument);
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
  const Status late = batch.run(*layer, reply);
  REQUIRE_FALSE(late.ok());
  CHECK(late.error().code == ErrorCode::kTimeout);
  CHECK(late.error().message.find("sim-cuda 0 (simulated CUDA device) did not finish") !=
        std::string::npos);
  CHECK(batch.run(*layer, reply).error().code == ErrorCode::kWorkerFailed);
}

}  // namespace
}  // namespace dflash::compute::gpu
