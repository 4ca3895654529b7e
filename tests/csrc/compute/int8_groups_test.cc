// int8-groups: the kernels of every instruction set have the twin's bits over formats, shapes,
// rows, threads and special values.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <limits>

#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::spec_of;
using toy::StoredExperts;
using toy::Twins;

constexpr NumericsClass kClass = NumericsClass::kInt8Groups;

const toy::Machines kMachines = toy::kernel_sets_of(kClass);

std::vector<WeightFormat> formats() {
  std::vector<WeightFormat> taken;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (has_panels(format) && numerics_facts(kClass).takes(format)) taken.push_back(format);
  }
  return taken;
}

TEST_CASE(
    "int8-groups: every instruction set gives the twin's bits in every format, for few rows and "
    "many, in widths of one block and uneven ones") {
  uint32_t seed = 1;
  for (WeightFormat format : formats()) {
    const uint32_t block = format_facts(toy::source_of(format)).block;
    for (const FfnSpec& spec : {toy::uneven_spec_of(format), spec_of(block, block, 37)})
      check_formats(kMachines, spec, format, ++seed, {1, 2, 3, 4, 5, 13});
  }
}

TEST_CASE(
    "int8-groups: every number of rows gives the twin's bits, spread over experts, with one thread "
    "and more") {
  const StoredExperts experts(spec_of(544, 96, 130), 5, WeightFormat::kQ8_0, WeightFormat::kQ4_0,
                              5);
  check_numbers_of_rows(toy::kernel_sets_of(kClass, {1, 2}), experts,
                        {WeightFormat::kQ8_0, WeightFormat::kQ4_0},
                        {1, 4, 5, 6, 7, 8, 12, 16, 19, 31, 32, 33, 97, 150});
}

TEST_CASE("int8-groups: weights made of floats of any width have the twin's bits") {
  const std::vector<toy::Shape> shapes = {
      {1,   1,   1  },
      {7,   5,   3  },
      {255, 33,  65 },
      {257, 300, 40 },
      {600, 31,  515}
  };
  check_shapes(kMachines, shapes, {WeightFormat::kInt8G32});
  check_shapes(kMachines, shapes, {WeightFormat::kInt4G32});
}

TEST_CASE("int8-groups: a row's bits do not depend on the rows beside it") {
  const StoredExperts experts(spec_of(512, 256, 64), 2, WeightFormat::kQ5K, WeightFormat::kQ6K, 21);
  Twins(kMachines, experts, {WeightFormat::kQ5K, WeightFormat::kQ6K})
      .check_slices(Batch::of_one_expert(experts.spec(), 20, 0, 22));
}

TEST_CASE("int8-groups: NaN and infinity make their own row NaN and leave the others alone") {
  const StoredExperts experts(spec_of(256, 64, 33), 2, WeightFormat::kQ4_0, WeightFormat::kQ8_0,
                              31);
  std::vector<float> specials = toy::special_values();
  specials[2] = -std::numeric_limits<float>::infinity();
  check_special_rows(kMachines, experts, {WeightFormat::kQ4_0, WeightFormat::kQ8_0}, specials);
}

TEST_CASE(
    "int8-groups: rows of the largest codes, of zeros and of the smallest numbers give the twin's "
    "bits") {
  const FfnSpec spec = spec_of(512, 256, 48);
  for (WeightFormat format : formats()) {
    const StoredExperts experts(spec, 1, toy::source_of(format), toy::source_of(format), 51);
    Batch batch = Batch::of_one_expert(spec, 6, 0, 52);
    batch.rows.clear();
    for (float value : {1.0f, -1.0f, 0.0f, 190.0f * 0x1p-149f, 63.0f * 0x1p-149f, 1e30f}) {
      // 127 or -127 nearly everywhere
      for (uint32_t i = 0; i < 512; ++i) batch.rows.push_back(i % 31 == 0 ? -value : value);
    }
    CAPTURE(format_name(format));
    Twins(kMachines, experts, format).check(batch);
  }
}

}  // namespace
}  // namespace dflash::compute
