// Class int8-groups on the simulated device, as CUDA and as HIP: the twin's and the CPU's bits over
// formats, widths, rows and orders of threads.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>

#include "cards/card_scene.h"
#include "cards/kernel_table.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/reference/int8_groups.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;

constexpr NumericsClass kClass = NumericsClass::kInt8Groups;
constexpr Card kCards[] = {
    {SimulatedVendor::kCuda, kClass},
    {SimulatedVendor::kHip,  kClass}
};

void check_format_on_both(const FfnSpec& spec, ResidentFormats formats, uint32_t seed) {
  for (const Card& card : kCards) check_format(card, spec, formats, seed);
}
TEST_CASE("int8-groups on cards: every format that the class takes gives the twin's bits") {
  uint32_t seed = 1;
  for (WeightFormat format : kIntegerFormats)
    check_format_on_both(spec_of(512, 256, 70), format, ++seed);
}

TEST_CASE("int8-groups on cards: the formats of the kernels are those the class takes") {
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    const bool has_kernels = std::find(std::begin(kIntegerFormats), std::end(kIntegerFormats),
                                       format) != std::end(kIntegerFormats);
    CHECK(has_kernels == (numerics_facts(kClass).takes(format) && is_card_format(format)));
    const auto layer = GpuLayer::create(device_of({}), spec_of(256, 256, 32), 1, format, kClass);
    CHECK(layer.ok() == has_kernels);
    if (!layer.ok()) CHECK(layer.error().message.find(format_name(format)) != std::string::npos);
  }
  const auto refused = GpuLayer::create(device_of({SimulatedVendor::kHip}), spec_of(256, 256, 32),
                                        1, WeightFormat::kBF16, NumericsClass::kBf16Dot);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message.find("bf16-dot") != std::string::npos);
}

TEST_CASE(
    "int8-groups on cards: widths that end inside a chain, a step, a group or a panel give the "
    "twin's bits") {
  uint32_t seed = 50;
  for (WeightFormat format : kIntegerFormats) {
    check_format_on_both(uneven_spec_of(format), format, ++seed);
  }
  struct Shape {
    uint32_t in, intermediate, out;
  };
  for (const Shape& shape : {
           Shape{1,   1,   1 },
           {7,   5,   3 },
           {129, 200, 65},
           {257, 384, 40}
  }) {
    check_format_on_both(spec_of(shape.in, shape.intermediate, shape.out),
                         {WeightFormat::kInt8G32, WeightFormat::kInt4G32}, ++seed);
  }
}

TEST_CASE("int8-groups on cards: unlike formats of gate, up and down give the twin's bits") {
  check_format_on_both(spec_of(256, 256, 64), {WeightFormat::kQ4K, WeightFormat::kQ6K}, 90);
  check_format_on_both(spec_of(256, 288, 64), {WeightFormat::kIq4Xs, WeightFormat::kQ8_0}, 91);
}

TEST_CASE(
    "int8-groups on cards: every number of rows, spread over experts or listed on the device, "
    "gives the twin's bits") {
  const FfnSpec spec = spec_of(288, 96, 100);
  const ResidentFormats formats{WeightFormat::kQ8_0, WeightFormat::kQ4_0};
  const StoredExperts experts(spec, 5, WeightFormat::kQ8_0, WeightFormat::kQ4_0, 5);
  for (const Card& card : kCards) {
    const Twins twins = twins_of(card, spec, 5, formats, experts);
    for (uint32_t rows : {1u, 2u, 4u, 5u, 16u, 17u, 64u, 65u, 260u}) {
      CAPTURE(rows);
      Batch batch = Batch::random(spec, 5, rows, 4, rows);
      batch.row_dtype = static_cast<Dtype>(rows % 3);
      batch.reply_dtype = static_cast<Dtype>(rows / 3 % 3);
      check_same(twins, batch);
    }
  }
}

TEST_CASE("int8-groups: a card and a processor that swap an expert's shard give the same bits") {
  const FfnSpec spec = spec_of(544, 160, 96);
  const ResidentFormats formats{WeightFormat::kInt8G32, WeightFormat::kInt4G32};
  const Experts experts(spec, 4, Dtype::kBF16, 7);
  for (const Card& which : kCards) {
    const auto card = layer_on(which, spec, 4, formats);
    REQUIRE(experts.load_into(*card).ok());
    for (Isa isa : kAllIsas) {
      if (!isa_is_supported(isa)) continue;
      const auto backend = CpuBackend::create(isa, 2).value();
      const auto processor = backend->create_layer(spec, 4, formats, kClass).value();
      REQUIRE(experts.load_into(*processor).ok());
      for (uint32_t rows : {2u, 60u}) {
        Batch batch = Batch::random(spec, 4, rows, 3, 8 + rows);
        batch.row_dtype = batch.reply_dtype = Dtype::kBF16;
        CHECK_MESSAGE(reply_of(*card, batch) == reply_of(*processor, batch), isa_name(isa), ", ",
                      rows, " rows");
      }
    }
  }
}

TEST_CASE("int8-groups on cards: gates, activations and biases give the twin's bits") {
  uint32_t seed = 100;
  for (int gate = 0; gate <= 2; ++gate) {
    for (Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kReluSquared}) {
      FfnSpec spec = spec_of(64, 96, 50);
      spec.activation = activation;
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = spec.has_down_bias = ++seed % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu)
        spec.alpha = 1.702f, spec.up_offset = 1.0f, spec.gate_max = 0.5f, spec.up_limit = 0.75f;
      const Experts experts(spec, 2, Dtype::kF16, seed);
      const Twins twins = twins_of(kCards[seed % 2], spec, 2, WeightFormat::kInt8G32, experts);
      for (uint32_t rows : {5u, 40u}) check_same(twins, Batch::random(spec, 2, rows, 3, seed));
    }
  }
}

TEST_CASE(
    "int8-groups on cards: no order of threads and blocks changes a bit, nor do the rows beside a "
    "row") {
  check_orders_and_slices({kCards[0], kCards[1]}, spec_of(512, 256, 70),
                          {WeightFormat::kQ5K, WeightFormat::kQ6K});
}

TEST_CASE(
    "int8-groups on cards: zeros, subnormals, NaN and infinity stay in their own group or row, as "
    "the twin has them") {
  for (const Card& card : kCards)
    check_special_values(card, WeightFormat::kInt8G32, std::numeric_limits<float>::max());
}

TEST_CASE(
    "int8-groups on cards: a batch larger than the scratch bound is computed in pieces, to the "
    "same bits") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 63);
  const auto expected = make_reference_layer(spec, 3, WeightFormat::kInt4G32, kClass);
  // some 15 pairs
  const auto on = std::make_shared<GpuDevice>(make_simulated_runtime({}).value(),
                                              std::chrono::seconds(100), 16384);
  const auto layer = layer_on(on, spec, 3, WeightFormat::kInt4G32, kClass);
  REQUIRE(experts.load_into(*expected).ok());
  REQUIRE(experts.load_into(*layer).ok());
  const Batch batch = Batch::random(spec, 3, 70, 3, 64);
  CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
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
