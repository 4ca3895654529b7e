// f32-canonical: every instruction set gives the reference's bits, whatever the shape, the dtype,
// the neighbours and the threads.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>

#include "foreign_float_mode.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;
using toy::kernel_sets;
using toy::kernel_sets_of;
using toy::reply_of;
using toy::spec_of;
using toy::Twins;

const toy::Machines kMachines = kernel_sets_of(NumericsClass::kF32Canonical);

TEST_CASE("every instruction set gives the reference's bits over shapes and dtypes") {
  const std::vector<toy::Shape> shapes = {
      {1,   1,   1  },
      {7,   5,   3  },
      {64,  33,  65 },
      {255, 96,  130},
      {256, 64,  64 },
      {257, 300, 71 },
      {600, 31,  515}
  };
  check_shapes(kMachines, shapes, {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kBF16});
}

TEST_CASE("narrow weights held as float32 give the reference's bits") {
  for (Dtype stored : {Dtype::kF16, Dtype::kBF16}) {
    const Experts experts(spec_of(257, 300, 71), 5, stored, 8);
    Twins(kMachines, experts, WeightFormat::kF32).check(Batch::random(experts.spec(), 5, 9, 4, 9));
  }
}

TEST_CASE(
    "every number of rows gives the reference's bits, on one expert and spread over several") {
  const Experts experts(spec_of(300, 70, 100), 3, Dtype::kBF16, 5);
  check_numbers_of_rows(kMachines, experts, Dtype::kBF16,
                        {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 23, 31, 32, 33, 37, 70});
}

TEST_CASE("every activation, gate and bias gives the reference's bits") {
  check_gates(kMachines, toy::all_activations(), Dtype::kF16, Dtype::kF16);
}

TEST_CASE("one, two and three threads give the same bits") {
  const Experts experts(spec_of(512, 200, 384), 6, Dtype::kBF16, 9);
  check_numbers_of_rows(kernel_sets_of(NumericsClass::kF32Canonical, {1, 2, 3}), experts,
                        Dtype::kBF16, {1, 5, 40});
}

TEST_CASE("a row's bits do not depend on the rows beside it") {
  const Experts experts(spec_of(320, 90, 128), 4, Dtype::kF32, 21);
  const Twins twins(kMachines, experts, Dtype::kF32);
  const Batch batch = Batch::random(experts.spec(), 4, 30, 4, 22);
  twins.check_slices(batch);
  for (uint32_t r = 0; r < batch.num_rows(); ++r) twins.check(batch.slice(r, r + 1));
}

TEST_CASE("NaN and infinity stay in their own row, as the one canonical NaN") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 31);
  check_special_rows(kMachines, experts, Dtype::kBF16, toy::special_values());
}

TEST_CASE("the caller's floating-point mode changes nothing and comes back") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 2, Dtype::kF32, 41);
  Batch batch = Batch::random(spec, 2, 6, 2, 42);
  for (float& value : batch.rows) value *= 1e-38f;  // products in the subnormal range
  for (Isa isa : kernel_sets()) {
    const auto layer = toy::load(isa, experts, Dtype::kF32, kDefaultNumerics, 2);
    const std::vector<std::byte> expected = reply_of(*layer, batch);
    for (const unsigned word : kForeignModes) {
      const ForeignFloatMode mode(word);
      const std::vector<std::byte> found = reply_of(*layer, batch);
      CHECK(float_control() == word);
      CHECK(found == expected);
    }
  }
}

TEST_CASE("a row without experts gets zeros and a batch without rows is fine") {
  const Experts experts(spec_of(16, 16, 40), 2, Dtype::kF32, 51);
  const Twins twins(kernel_sets_of(NumericsClass::kF32Canonical, {2}), experts, Dtype::kF32);
  const Batch batch = Batch::random(experts.spec(), 2, 3, 0, 52);
  CHECK(reply_of(twins.twin(), batch) == std::vector<std::byte>(3 * 40 * 4, std::byte{0}));
  twins.check(batch);
  twins.check(Batch{});
}

TEST_CASE("the result is within the derived bound of float64") {
  FfnSpec spec = spec_of(512, 256, 200);
  spec.has_gate_up_bias = spec.has_down_bias = true;
  const Experts experts(spec, 4, Dtype::kBF16, 61);
  const Batch batch = Batch::random(spec, 4, 24, 4, 62);
  const auto layer = toy::load(best_isa(), experts, Dtype::kBF16);
  const std::vector<std::byte> bytes = reply_of(*layer, batch);
  const std::vector<std::byte> encoded = toy::encode(batch.row_dtype, batch.rows);
  std::vector<std::byte> unused(bytes.size());
  const std::vector<double> exact =
      forward_float64(spec, experts.all_weights(), batch.args(encoded, unused));
  // A chain of n fmas errs by at most n u sum|a_i b_i| (Higham, section 3.1); with unit rows and
  // weights of scale 1/sqrt(K) the sum is <= |w| |x| ~ sqrt(K) * max. Twice (up, down) and 4 pairs
  // a row: 4 * 2 * 256 * 2^-24 * scale bounds every element.
  const double scale = std::sqrt(512.0);
  const double bound = 4 * 2 * 256 * std::ldexp(1.0, -24) * scale;
  double worst = 0, power = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    float found;
    std::memcpy(&found, bytes.data() + 4 * i, 4);
    worst = std::max(worst, std::fabs(static_cast<double>(found) - exact[i]));
    power += exact[i] * exact[i];
  }
  const double rms = std::sqrt(power / static_cast<double>(exact.size()));
  CHECK(worst <= bound);
  // rounding errors are random, so the real figure is far below the bound
  CHECK(worst <= 1e-5 * rms);
}

}  // namespace
}  // namespace dflash::compute
