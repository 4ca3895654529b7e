// The matrix-unit classes on the simulated device, with teams of 32 and of 64 threads: the
// reference's bits over shapes, formats, numbers of rows and orders of threads, so that few-row and
// many-row kernels have equal bits; and what a row's bits do not depend on.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include "cards/card_scene.h"
#include "cards/host_routing.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::count_outside;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;
using toy::Twins;

constexpr Card kCards[] = {
    {SimulatedVendor::kCuda, NumericsClass::kBf16Mma },
    {SimulatedVendor::kHip,  NumericsClass::kBf16Mfma}
};

const toy::Machines kMachines[] = {
    cards_of(NumericsClass::kBf16Mma, {SimulatedVendor::kCuda}),
    cards_of(NumericsClass::kBf16Mfma, {SimulatedVendor::kHip}),
};

TEST_CASE(
    "matrix units: shapes that end inside a tile, a step, a chain or a panel give the reference's "
    "bits") {
  const std::vector<toy::Shape> shapes = {
      {1,    1,   1  },
      {7,    5,   3  },
      {33,   40,  65 },
      {255,  96,  130},
      {256,  64,  64 },
      {257,  290, 71 },
      {600,  31,  97 },
      {2307, 40,  33 }
  };
  for (const toy::Machines& cards : kMachines)
    check_shapes(cards, shapes, {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kBF16});
}

TEST_CASE("matrix units: every weight format gives the reference's bits, stored or made at load") {
  uint32_t seed = 300;
  for (WeightFormat format : kCardFormats) {
    for (const toy::Machines& cards : kMachines)
      check_formats(cards, toy::uneven_spec_of(format), format, ++seed, {3, 33});
  }
}

TEST_CASE(
    "matrix units: every number of rows gives the reference's bits, and lists of either maker") {
  const Experts experts(spec_of(300, 70, 40), 3, Dtype::kBF16, 5);
  const Batch listed_there = Batch::random(experts.spec(), 3, 400, 4, 9);
  REQUIRE(listed_there.ids.size() > kMostHostPairs);
  for (const toy::Machines& cards : kMachines) {
    check_numbers_of_rows(cards, experts, Dtype::kBF16, {1, 2, 15, 16, 17, 63, 64, 65, 200});
    Twins(cards, experts, Dtype::kBF16).check(listed_there);
  }
}

TEST_CASE("matrix units: every gate and bias gives the reference's bits, in both kernels") {
  for (const toy::Machines& cards : kMachines) {
    check_gates(cards, {Activation::kSilu, Activation::kGeluTanh, Activation::kReluSquared},
                Dtype::kF16, Dtype::kF16);
  }
}

TEST_CASE(
    "matrix units: a row's bits do not depend on its neighbours, nor on its place in a tile or the "
    "kernel that takes it") {
  const Experts experts(spec_of(520, 100, 70), 2, Dtype::kF32, 41);
  Batch batch = Batch::of_one_expert(experts.spec(), 70, 0, 42);
  // Every second row is far larger than its neighbours.
  for (size_t i = 0; i < batch.rows.size(); ++i) batch.rows[i] *= i / 520 % 2 == 0 ? 1.0f : 1000.0f;
  for (const toy::Machines& cards : kMachines)
    Twins(cards, experts, Dtype::kF32).check_slices(batch);
}

TEST_CASE("matrix units: no order of threads and blocks changes a bit") {
  const StoredExperts experts(spec_of(520, 100, 70), 4, WeightFormat::kBF16, WeightFormat::kBF16,
                              51);
  const Batch batch = Batch::random(experts.spec(), 4, 50, 5, 52);
  for (const Card& card : kCards) {
    const std::vector<SimulatedVendor> four(4, card.vendor);
    Twins(cards_of(card.numerics, four), experts, WeightFormat::kBF16).check(batch);
  }
}

TEST_CASE("matrix units: NaN and infinity stay in their own row") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 61);
  std::vector<float> specials = toy::special_values();
  specials[2] = 3.4e38f;  // infinity as bf16
  for (const toy::Machines& cards : kMachines)
    check_special_rows(cards, experts, Dtype::kBF16, specials);
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
                       [](const toy::Twins& twins, const OutputBounds& bounds, const Batch& batch) {
                         CHECK(count_outside(bounds, reply_of(twins.layer(0), batch)) == 0);
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
  CHECK(GpuLayer::create(device_of({}), spec_of(32, 32, 32), 1, WeightFormat::kBF16,
                         NumericsClass::kBf16Wmma) ==
        Failed(ErrorCode::kUnsupported, "does not compute numerics class bf16-wmma"));
}

}  // namespace
}  // namespace dflash::compute::gpu
