// Class int8-groups on the simulated device, as CUDA and as HIP: the twin's and the CPU's bits over formats, widths, rows and orders of threads.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "compute/cpu/cpu_backend.h"
#include "compute/gpu/gpu_layer.h"
#include "compute/gpu/record_layout.h"
#include "compute/gpu/sim/sim_runtime.h"
#include "compute/reference/int8_groups.h"
#include "compute/reference/reference.h"
#include "compute/stored_experts.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::StoredExperts;
using toy::reply_of;
using toy::source_of;
using toy::spec_of;

constexpr NumericsClass kClass = NumericsClass::kInt8Groups;
constexpr SimulatedVendor kVendors[] = {SimulatedVendor::kCuda, SimulatedVendor::kHip};

std::shared_ptr<GpuDevice> device(SimulatedVendor vendor, uint64_t seed = 1) {
  return std::make_shared<GpuDevice>(make_simulated_runtime({vendor, uint64_t{1} << 28, seed}).value(), std::chrono::seconds(100));
}

std::unique_ptr<ExpertLayer> layer_on(std::shared_ptr<GpuDevice> on, const FfnSpec& spec, uint32_t num_experts, ResidentFormats formats) {
  auto layer = GpuLayer::create(std::move(on), spec, num_experts, formats, kClass);
  REQUIRE_MESSAGE(layer.ok(), (layer.ok() ? "" : layer.error().message));
  return std::move(layer).value();
}

std::unique_ptr<ExpertLayer> twin(const FfnSpec& spec, uint32_t num_experts, ResidentFormats formats) {
  return make_reference_layer(spec, num_experts, formats, kClass);
}

// Rows that all go to expert 1: of so many of one expert as the kernels see.
Batch of_one_expert(const FfnSpec& spec, uint32_t rows, uint32_t seed) {
  Batch batch = Batch::random(spec, 2, rows, 1, seed);
  batch.row_counts.assign(rows, 1);
  batch.ids.assign(rows, 1);
  batch.weights.assign(rows, 0.75f);
  return batch;
}

// Both vendors against the twin: a row alone, tiles of few rows, tiles of many.
void check_format(const FfnSpec& spec, ResidentFormats formats, uint32_t seed) {
  const StoredExperts experts(spec, 2, source_of(formats.gate_up), source_of(formats.down), seed);
  const auto expected = twin(spec, 2, formats);
  REQUIRE(experts.load_into(*expected).ok());
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor, seed), spec, 2, formats);
    REQUIRE(experts.load_into(*layer).ok());
    for (uint32_t rows : {1u, 3u, 37u}) {
      CAPTURE(format_name(formats.gate_up));
      CAPTURE(format_name(formats.down));
      CAPTURE(rows);
      const Batch batch = of_one_expert(spec, rows, seed + rows);
      CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
    }
  }
}

TEST_CASE("int8-groups on cards: every format that the class takes gives the twin's bits") {
  uint32_t seed = 1;
  for (WeightFormat format : kIntegerFormats) check_format(spec_of(512, 256, 70), format, ++seed);
}

TEST_CASE("int8-groups on cards: the formats of the kernels are those the class takes") {
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    const bool has_kernels = std::find(std::begin(kIntegerFormats), std::end(kIntegerFormats), format) != std::end(kIntegerFormats);
    CHECK(has_kernels == numerics_take(kClass, format));
    const auto layer = GpuLayer::create(device(SimulatedVendor::kCuda), spec_of(256, 256, 32), 1, format, kClass);
    CHECK(layer.ok() == has_kernels);
    if (!layer.ok()) CHECK(layer.error().message.find(format_name(format)) != std::string::npos);
  }
  const auto refused = GpuLayer::create(device(SimulatedVendor::kHip), spec_of(256, 256, 32), 1, WeightFormat::kBF16, NumericsClass::kBf16Dot);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message.find("bf16-dot") != std::string::npos);
}

TEST_CASE("int8-groups on cards: widths that end inside a chain, a step, a group or a panel give the twin's bits") {
  uint32_t seed = 50;
  for (WeightFormat format : kIntegerFormats) {
    const uint32_t block = format_facts(source_of(format)).block;
    check_format(block == 256 ? spec_of(768, 256, 33) : block == 32 ? spec_of(288, 96, 33) : spec_of(301, 77, 33), format, ++seed);
  }
  struct Shape { uint32_t in, intermediate, out; };
  for (const Shape& shape : {Shape{1, 1, 1}, {7, 5, 3}, {129, 200, 65}, {257, 384, 40}}) {
    check_format(spec_of(shape.in, shape.intermediate, shape.out), {WeightFormat::kInt8G32, WeightFormat::kInt4G32}, ++seed);
  }
}

TEST_CASE("int8-groups on cards: unlike formats of gate, up and down give the twin's bits") {
  check_format(spec_of(256, 256, 64), {WeightFormat::kQ4K, WeightFormat::kQ6K}, 90);
  check_format(spec_of(256, 288, 64), {WeightFormat::kIq4Xs, WeightFormat::kQ8_0}, 91);
}

TEST_CASE("int8-groups on cards: every number of rows, spread over experts or listed on the device, gives the twin's bits") {
  const FfnSpec spec = spec_of(288, 96, 100);
  const ResidentFormats formats{WeightFormat::kQ8_0, WeightFormat::kQ4_0};
  const StoredExperts experts(spec, 5, WeightFormat::kQ8_0, WeightFormat::kQ4_0, 5);
  const auto expected = twin(spec, 5, formats);
  REQUIRE(experts.load_into(*expected).ok());
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor), spec, 5, formats);
    REQUIRE(experts.load_into(*layer).ok());
    for (uint32_t rows : {1u, 2u, 4u, 5u, 16u, 17u, 64u, 65u, 260u}) {
      CAPTURE(rows);
      Batch batch = Batch::random(spec, 5, rows, 4, rows);
      batch.row_dtype = static_cast<Dtype>(rows % 3);
      batch.reply_dtype = static_cast<Dtype>(rows / 3 % 3);
      CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
    }
  }
}

TEST_CASE("int8-groups: a card and a processor that swap an expert's shard give the same bits") {
  const FfnSpec spec = spec_of(544, 160, 96);
  const ResidentFormats formats{WeightFormat::kInt8G32, WeightFormat::kInt4G32};
  const Experts experts(spec, 4, Dtype::kBF16, 7);
  for (SimulatedVendor vendor : kVendors) {
    const auto card = layer_on(device(vendor), spec, 4, formats);
    REQUIRE(experts.load_into(*card).ok());
    for (Isa isa : kAllIsas) {
      if (!isa_is_supported(isa)) continue;
      const auto backend = CpuBackend::create(isa, 2).value();
      const auto processor = backend->create_layer(spec, 4, formats, kClass).value();
      REQUIRE(experts.load_into(*processor).ok());
      for (uint32_t rows : {2u, 60u}) {
        Batch batch = Batch::random(spec, 4, rows, 3, 8 + rows);
        batch.row_dtype = batch.reply_dtype = Dtype::kBF16;
        CHECK_MESSAGE(reply_of(*card, batch) == reply_of(*processor, batch), isa_name(isa), ", ", rows, " rows");
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
      if (spec.gate == GateKind::kClampedSwiglu) spec.alpha = 1.702f, spec.up_offset = 1.0f, spec.gate_max = 0.5f, spec.up_limit = 0.75f;
      const Experts experts(spec, 2, Dtype::kF16, seed);
      const auto expected = twin(spec, 2, WeightFormat::kInt8G32);
      const auto layer = layer_on(device(kVendors[seed % 2]), spec, 2, WeightFormat::kInt8G32);
      REQUIRE(experts.load_into(*expected).ok());
      REQUIRE(experts.load_into(*layer).ok());
      for (uint32_t rows : {5u, 40u}) {
        const Batch batch = Batch::random(spec, 2, rows, 3, seed);
        CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
      }
    }
  }
}

TEST_CASE("int8-groups on cards: no order of threads and blocks changes a bit, nor do the rows beside a row") {
  const FfnSpec spec = spec_of(512, 256, 70);
  const ResidentFormats formats{WeightFormat::kQ5K, WeightFormat::kQ6K};
  const StoredExperts experts(spec, 2, WeightFormat::kQ5K, WeightFormat::kQ6K, 41);
  const Batch batch = of_one_expert(spec, 24, 42);
  std::vector<std::byte> expected;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const auto layer = layer_on(device(kVendors[seed % 2], seed), spec, 2, formats);
    REQUIRE(experts.load_into(*layer).ok());
    const std::vector<std::byte> found = reply_of(*layer, batch);
    if (seed == 1) expected = found;
    CHECK(found == expected);
    for (uint32_t begin : {0u, 5u, 21u}) {  // slices of three rows, which the few-row kernels compute
      Batch slice = of_one_expert(spec, 3, 1);
      slice.rows.assign(batch.rows.begin() + begin * 512, batch.rows.begin() + (begin + 3) * 512);
      const std::vector<std::byte> part = reply_of(*layer, slice);
      CHECK(std::memcmp(part.data(), expected.data() + size_t{begin} * 70 * 4, part.size()) == 0);
    }
  }
}

TEST_CASE("int8-groups on cards: zeros, subnormals, NaN and infinity stay in their own group or row, as the twin has them") {
  const FfnSpec spec = spec_of(96, 64, 40);
  const Experts experts(spec, 2, Dtype::kBF16, 31);
  const auto expected = twin(spec, 2, WeightFormat::kInt8G32);
  REQUIRE(experts.load_into(*expected).ok());
  Batch batch = Batch::random(spec, 2, 40, 3, 32);
  std::fill_n(batch.rows.begin(), 96, 0.0f);
  for (uint32_t i = 0; i < 32; ++i) batch.rows[2 * 96 + 32 + i] *= 0x1p-143f;
  batch.rows[3 * 96 + 5] = std::bit_cast<float>(0xffabcdefu);
  batch.rows[7 * 96 + 40] = -std::numeric_limits<float>::infinity();
  batch.rows[9 * 96 + 1] = std::numeric_limits<float>::max();
  for (SimulatedVendor vendor : kVendors) {
    const auto layer = layer_on(device(vendor), spec, 2, WeightFormat::kInt8G32);
    REQUIRE(experts.load_into(*layer).ok());
    for (Dtype dtype : {Dtype::kF32, Dtype::kBF16}) {
      batch.reply_dtype = dtype;
      CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
    }
  }
}

TEST_CASE("int8-groups on cards: a batch larger than the scratch bound is computed in pieces, to the same bits") {
  const FfnSpec spec = spec_of(64, 48, 80);
  const Experts experts(spec, 3, Dtype::kBF16, 63);
  const auto expected = twin(spec, 3, WeightFormat::kInt4G32);
  const auto on = std::make_shared<GpuDevice>(make_simulated_runtime({}).value(), std::chrono::seconds(100), 16384);  // some 15 pairs
  const auto layer = layer_on(on, spec, 3, WeightFormat::kInt4G32);
  REQUIRE(experts.load_into(*expected).ok());
  REQUIRE(experts.load_into(*layer).ok());
  const Batch batch = Batch::random(spec, 3, 70, 3, 64);
  CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
}

TEST_CASE("records of rows hold the twin's codes and scales, whatever the bits of the rows, and zeros behind their end") {
  constexpr uint32_t kRows = 5, kInputs = 301, kStride = 304;
  std::mt19937 random(77);
  for (SimulatedVendor vendor : kVendors) {
    for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      std::vector<float> values(kRows * kStride);
      for (uint32_t i = 0; i < values.size(); ++i) {
        const float unit = static_cast<float>(random() % 20001) / 10000.0f - 1.0f;
        values[i] = i / kStride == 4 ? std::bit_cast<float>(static_cast<uint32_t>(random())) : unit * std::exp2(static_cast<float>(i % 7) - 140.0f * (i / kStride == 3));
      }
      const std::vector<std::byte> source = toy::encode(dtype, values);
      widen(dtype, source.data(), values.data(), values.size());
      const auto runtime = make_simulated_runtime({vendor, uint64_t{1} << 20, 3}).value();
      std::byte* in = runtime->allocate(source.size()).value();
      std::byte* out = runtime->allocate(kRows * int8_row_bytes(kInputs)).value();
      std::vector<std::byte> records(kRows * int8_row_bytes(kInputs));
      REQUIRE(runtime->copy_in(in, source.data(), source.size()).ok());
      const QuantizeParams params{in, reinterpret_cast<unsigned char*>(out), kRows, kInputs, kStride, dtype};
      REQUIRE(runtime->launch({.kernel = kernel_id(PlainKernel::k_quantize_rows), .grid_x = kRows * 2 * 64 / 256 + 1, .threads = 256,
                               .params = &params, .params_bytes = sizeof(params)}).ok());
      REQUIRE(runtime->copy_out(records.data(), out, records.size()).ok());
      REQUIRE(runtime->wait(std::chrono::seconds(30)).value());
      for (uint32_t row = 0; row < kRows; ++row) {
        const Int8Codes expected = int8_codes(values.data() + row * kStride, kInputs);
        for (uint32_t input = 0; input < 2 * kChain; ++input) {
          const std::byte* record = records.data() + row * int8_row_bytes(kInputs) + input / kChain * kInt8RecordBytes;
          const int32_t code = static_cast<int8_t>(record[input % kChain]);
          REQUIRE(code == (input < kInputs ? expected.codes[input] : 0));
          if (input % 32 != 0 || input >= kInputs) continue;
          float scales[2];
          std::memcpy(&scales[0], record + kChain + input % kChain / 32 * 4, 4);
          std::memcpy(&scales[1], record + kChain + 32 + input % kChain / 32 * 4, 4);
          int32_t sum = 0;
          for (uint32_t i = input; i < std::min(input + 32, kInputs); ++i) sum += expected.codes[i];
          const float scale = expected.scales[input / 32];
          REQUIRE((scales[0] == scale || (std::isnan(scales[0]) && std::isnan(scale))));
          REQUIRE((scales[1] == scale * static_cast<float>(sum) || std::isnan(scale)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace dflash::compute::gpu
