// The matrix-unit classes on the simulated device, with teams of 32 and of 64 threads: the
// reference's bits over shapes, formats, numbers of rows and orders of threads, so that few-row and
// many-row kernels have equal bits; and what a row's bits do not depend on.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "cards/card_scene.h"
#include "cards/host_routing.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::count_outside;
using toy::Experts;
using toy::reply_of;
using toy::source_of;
using toy::spec_of;
using toy::StoredExperts;

constexpr Card kCards[] = {
    {SimulatedVendor::kCuda, NumericsClass::kBf16Mma },
    {SimulatedVendor::kHip,  NumericsClass::kBf16Mfma}
};

TEST_CASE(
    "matrix units: shapes that end inside a tile, a step, a chain or a panel give the reference's "
    "bits") {
  struct Shape {
    uint32_t in, intermediate, out;
  };
  const Shape shapes[] = {
      {1,    1,   1  },
      {7,    5,   3  },
      {33,   40,  65 },
      {255,  96,  130},
      {256,  64,  64 },
      {257,  290, 71 },
      {600,  31,  97 },
      {2307, 40,  33 }
  };
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (const Card& card : kCards) {
      const auto dtype = static_cast<Dtype>(++seed % 3);
      const FfnSpec spec = spec_of(shape.in, shape.intermediate, shape.out);
      const Experts experts(spec, 3, dtype, seed);
      const Twins twins = twins_of(card, spec, 3, dtype, experts, seed);
      Batch batch = Batch::random(spec, 3, 24, 3, seed);
      // one expert with many rows, others with few
      for (size_t i = 0; i < batch.ids.size(); i += 2) batch.ids[i] = 2;
      batch.row_dtype = static_cast<Dtype>(seed / 2 % 3);
      batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
      CAPTURE(shape.in);
      CAPTURE(numerics_name(card.numerics));
      check_same(twins, batch);
    }
  }
}

TEST_CASE("matrix units: every weight format gives the reference's bits, stored or made at load") {
  uint32_t seed = 300;
  for (WeightFormat format : kCardFormats) {
    const FfnSpec spec = uneven_spec_of(format);
    for (const Card& card : kCards) {
      const StoredExperts experts(spec, 2, source_of(format), source_of(format), ++seed);
      const Twins twins = twins_of(card, spec, 2, format, experts, seed);
      for (uint32_t rows : {3u, 33u}) {
        CAPTURE(format_name(format));
        CAPTURE(numerics_name(card.numerics));
        CAPTURE(rows);
        check_same(twins, Batch::random(spec, 2, rows, 3, seed + rows));
      }
    }
  }
}

TEST_CASE(
    "matrix units: every number of rows gives the reference's bits, and lists of either maker") {
  const FfnSpec spec = spec_of(300, 70, 40);
  const Experts experts(spec, 3, Dtype::kBF16, 5);
  for (const Card& card : kCards) {
    const Twins twins = twins_of(card, spec, 3, Dtype::kBF16, experts);
    for (uint32_t rows : {1u, 2u, 15u, 16u, 17u, 63u, 64u, 65u, 200u}) {
      CAPTURE(rows);
      check_same(twins, to_one_expert(spec, rows, 1, rows));
    }
    const Batch listed_there = Batch::random(spec, 3, 400, 4, 9);
    REQUIRE(listed_there.ids.size() > kMostHostPairs);
    check_same(twins, listed_there);
  }
}

TEST_CASE("matrix units: every gate and bias gives the reference's bits, in both kernels") {
  uint32_t seed = 100;
  for (int gate = 0; gate <= 2; ++gate) {
    for (int activation : {0, 2, 4}) {
      FfnSpec spec = spec_of(40, 50, 60);
      spec.activation = static_cast<Activation>(activation);
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = ++seed % 2 == 0;
      spec.has_down_bias = seed / 2 % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu) spec.alpha = 1.702f, spec.up_offset = 1.0f;
      const Card& card = kCards[seed % 2];
      const Experts experts(spec, 2, Dtype::kF16, seed);
      const Twins twins = twins_of(card, spec, 2, Dtype::kF16, experts);
      for (uint32_t rows : {5u, 40u}) check_same(twins, Batch::random(spec, 2, rows, 3, seed));
    }
  }
}

TEST_CASE(
    "matrix units: a row's bits do not depend on its neighbours, nor on its place in a tile or the "
    "kernel that takes it") {
  const FfnSpec spec = spec_of(520, 100, 70);
  const Experts experts(spec, 2, Dtype::kF32, 41);
  const size_t row_bytes = size_t{spec.out_size} * sizeof(float);
  for (const Card& card : kCards) {
    const auto layer = layer_on(card, spec, 2, Dtype::kF32);
    REQUIRE(experts.load_into(*layer).ok());
    const Batch alone = to_one_expert(spec, 1, 0, 42);
    const std::vector<std::byte> expected = reply_of(*layer, alone);
    for (uint32_t rows : {2u, 7u, 16u, 40u, 70u}) {
      for (uint32_t place : {0u, rows / 2, rows - 1}) {
        Batch crowd = to_one_expert(spec, rows, 0, 43 + rows + place);
        for (float& value : crowd.rows) value *= 1000.0f;
        std::copy(alone.rows.begin(), alone.rows.end(), crowd.rows.begin() + place * spec.in_size);
        const std::vector<std::byte> found = reply_of(*layer, crowd);
        CAPTURE(rows);
        CAPTURE(place);
        CHECK(std::memcmp(found.data() + place * row_bytes, expected.data(), row_bytes) == 0);
      }
    }
  }
}

TEST_CASE("matrix units: no order of threads and blocks changes a bit") {
  const FfnSpec spec = spec_of(520, 100, 70);
  const StoredExperts experts(spec, 4, WeightFormat::kBF16, WeightFormat::kBF16, 51);
  const Batch batch = Batch::random(spec, 4, 50, 5, 52);
  for (const Card& card : kCards) {
    const auto reference = make_reference_layer(spec, 4, WeightFormat::kBF16, card.numerics);
    REQUIRE(experts.load_into(*reference).ok());
    const std::vector<std::byte> expected = reply_of(*reference, batch);
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      const auto layer = layer_on(card, spec, 4, WeightFormat::kBF16, seed);
      REQUIRE(experts.load_into(*layer).ok());
      CHECK(reply_of(*layer, batch) == expected);
    }
  }
}

TEST_CASE("matrix units: NaN and infinity stay in their own row") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 61);
  Batch dirty = Batch::random(spec, 3, 20, 3, 62);
  dirty.rows[3 * 64 + 5] = std::numeric_limits<float>::quiet_NaN();
  dirty.rows[7 * 64 + 1] = std::numeric_limits<float>::infinity();
  dirty.rows[9 * 64 + 2] = 3.4e38f;  // infinity as bf16
  for (const Card& card : kCards) {
    const Twins twins = twins_of(card, spec, 3, Dtype::kBF16, experts);
    check_same(twins, dirty);
  }
}

TEST_CASE(
    "matrix units: replies lie within the derived bounds in every format, and those of other rows "
    "do not") {
  check_bounds({kCards[0], kCards[1]}, 700);
}

TEST_CASE(
    "matrix units: replies lie within the derived bounds for every activation and gate, with "
    "biases") {
  for_every_activation({kCards[0], kCards[1]}, 800,
                       [](const Twins& twins, const OutputBounds& bounds, const Batch& batch) {
                         CHECK(count_outside(bounds, reply_of(*twins.card, batch)) == 0);
                       });
}

TEST_CASE(
    "matrix units: a device offers the class of its own instructions and refuses the others") {
  DeviceFacts facts;
  const auto offers = [&facts](const char* backend, const char* architecture,
                               NumericsClass numerics) {
    facts.backend = backend;
    facts.architecture = architecture;
    return device_computes(facts, numerics);
  };
  for (const char* architecture : {"sm_80", "sm_86", "sm_90", "sm_120"})
    CHECK(offers("cuda", architecture, NumericsClass::kBf16Mma));
  for (const char* architecture : {"gfx908", "gfx90a", "gfx942"})
    CHECK(offers("hip", architecture, NumericsClass::kBf16Mfma));
  for (const char* architecture : {"gfx1100", "gfx1201"})
    CHECK(offers("hip", architecture, NumericsClass::kBf16Wmma));
  CHECK_FALSE(offers("cuda", "sm_75", NumericsClass::kBf16Mma));
  CHECK_FALSE(offers("cuda", "sm_90", NumericsClass::kBf16Mfma));
  for (const char* architecture : {"gfx906", "gfx1030", "gfx90a"})
    CHECK_FALSE(offers("hip", architecture, NumericsClass::kBf16Wmma));
  CHECK_FALSE(offers("hip", "gfx906", NumericsClass::kBf16Mfma));
  const auto refused = GpuLayer::create(device_of({}), spec_of(32, 32, 32), 1, WeightFormat::kBF16,
                                        NumericsClass::kBf16Wmma);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message.find("does not compute numerics class bf16-wmma") !=
        std::string::npos);
}

}  // namespace
}  // namespace dflash::compute::gpu
