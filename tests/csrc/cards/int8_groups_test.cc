// Class int8-groups on the simulated device, as CUDA and as HIP: the twin's and the CPU's bits over
// formats, widths, rows and orders of threads.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "cards/card_scene.h"
#include "cards/kernel_table.h"
#include "compute/reference/int8_groups.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::spec_of;
using toy::StoredExperts;
using toy::Twins;

constexpr NumericsClass kClass = NumericsClass::kInt8Groups;
const std::vector<SimulatedVendor> kBoth(std::begin(kVendors), std::end(kVendors));
const toy::Machines kMachines = cards_of(kClass, kBoth);

TEST_CASE("int8-groups on cards: every format that the class takes gives the twin's bits") {
  uint32_t seed = 1;
  for (WeightFormat format : kIntegerFormats)
    check_formats(kMachines, spec_of(512, 256, 70), format, ++seed);
}

TEST_CASE("int8-groups on cards: the formats of the kernels are those the class takes") {
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    const bool has_kernels = std::find(std::begin(kIntegerFormats), std::end(kIntegerFormats),
                                       format) != std::end(kIntegerFormats);
    CHECK(has_kernels == (numerics_facts(kClass).takes(format) && is_card_format(format)));
    const auto layer = GpuLayer::create(device_of({}), spec_of(256, 256, 32), 1, format, kClass);
    CHECK(layer.ok() == has_kernels);
    if (!layer.ok()) CHECK(layer.error().message == Has{format_name(format)});
  }
  const auto refused = GpuLayer::create(device_of({SimulatedVendor::kHip}), spec_of(256, 256, 32),
                                        1, WeightFormat::kBF16, NumericsClass::kBf16Dot);
  CHECK(refused == Failed(ErrorCode::kUnsupported, "bf16-dot"));
}

TEST_CASE(
    "int8-groups on cards: widths that end inside a chain, a step, a group or a panel give the "
    "twin's bits") {
  uint32_t seed = 50;
  for (WeightFormat format : kIntegerFormats)
    check_formats(kMachines, toy::uneven_spec_of(format), format, ++seed);
  const std::vector<toy::Shape> shapes = {
      {1,   1,   1 },
      {7,   5,   3 },
      {129, 200, 65},
      {257, 384, 40}
  };
  check_shapes(kMachines, shapes, {WeightFormat::kInt8G32, WeightFormat::kInt4G32});
}

TEST_CASE("int8-groups on cards: unlike formats of gate, up and down give the twin's bits") {
  check_formats(kMachines, spec_of(256, 256, 64), {WeightFormat::kQ4K, WeightFormat::kQ6K}, 90);
  check_formats(kMachines, spec_of(256, 288, 64), {WeightFormat::kIq4Xs, WeightFormat::kQ8_0}, 91);
}

TEST_CASE(
    "int8-groups on cards: every number of rows, spread over experts or listed on the device, "
    "gives the twin's bits") {
  const StoredExperts experts(spec_of(288, 96, 100), 5, WeightFormat::kQ8_0, WeightFormat::kQ4_0,
                              5);
  check_numbers_of_rows(kMachines, experts, {WeightFormat::kQ8_0, WeightFormat::kQ4_0},
                        {1, 2, 4, 5, 16, 17, 64, 65, 260});
}

TEST_CASE("int8-groups: a card and a processor that swap an expert's shard give the same bits") {
  const Experts experts(spec_of(544, 160, 96), 4, Dtype::kBF16, 7);
  toy::Machines machines = kMachines;
  for (const toy::Machine& one : toy::kernel_sets_of(kClass, {2}).all) machines.all.push_back(one);
  const Twins twins(machines, experts, {WeightFormat::kInt8G32, WeightFormat::kInt4G32});
  for (uint32_t rows : {2u, 60u}) {
    Batch batch = Batch::random(experts.spec(), 4, rows, 3, 8 + rows);
    batch.row_dtype = batch.reply_dtype = Dtype::kBF16;
    twins.check(batch);
  }
}

TEST_CASE("int8-groups on cards: gates, activations and biases give the twin's bits") {
  check_gates(kMachines, {Activation::kSilu, Activation::kGelu, Activation::kReluSquared},
              WeightFormat::kInt8G32, Dtype::kF16);
}

TEST_CASE(
    "int8-groups on cards: no order of threads and blocks changes a bit, nor do the rows beside a "
    "row") {
  const StoredExperts experts(spec_of(512, 256, 70), 2, WeightFormat::kQ5K, WeightFormat::kQ6K, 41);
  Twins(cards_of(kClass, {kBoth[0], kBoth[1], kBoth[0], kBoth[1]}), experts,
        {WeightFormat::kQ5K, WeightFormat::kQ6K})
      .check_slices(Batch::of_one_expert(experts.spec(), 24, 1, 42));
}

TEST_CASE(
    "int8-groups on cards: zeros, subnormals, NaN and infinity stay in their own group or row, as "
    "the twin has them") {
  check_special_values(kMachines, WeightFormat::kInt8G32, std::numeric_limits<float>::max());
}

TEST_CASE(
    "int8-groups on cards: a batch larger than the scratch bound is computed in pieces, to the "
    "same bits") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 63);
  Twins(card_of_little_scratch(kClass), experts, WeightFormat::kInt4G32)
      .check(Batch::random(experts.spec(), 3, 70, 3, 64));
}

TEST_CASE(
    "records of rows hold the twin's codes and scales, whatever the bits of the rows, and zeros "
    "behind their end") {
  static constexpr uint32_t kInputs = 301;
  const RowRecords made{kernel_id(PlainKernel::k_quantize_rows), kInputs, int8_row_bytes(kInputs),
                        7, 140.0f};
  for (SimulatedVendor vendor : kVendors) {
    check_row_records(vendor, made, [](const std::byte* records, const float* values) {
      const Int8Codes expected = int8_codes(values, kInputs);
      for (uint32_t input = 0; input < 2 * kChain; ++input) {
        const std::byte* record = records + input / kChain * kInt8RecordBytes;
        const int32_t code = static_cast<int8_t>(record[input % kChain]);
        REQUIRE(code == (input < kInputs ? expected.codes[input] : 0));
        if (input % 32 != 0 || input >= kInputs) continue;
        int32_t sum = 0;
        for (uint32_t i = input; i < std::min(input + 32, kInputs); ++i) sum += expected.codes[i];
        check_scales(record + kChain + input % kChain / 32 * 4, expected.scales[input / 32],
                     static_cast<float>(sum));
      }
    });
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
