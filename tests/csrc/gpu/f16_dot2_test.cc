// Class f16-dot2 on the simulated HIP device: the twin's bits over formats, widths, rows and orders of threads; replies within the derived bounds, which
// hold for other roundings of the instruction too; and who offers the class.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/convert.h"
#include "compute/gpu/gpu_layer.h"
#include "compute/gpu/host_routing.h"
#include "compute/gpu/record_layout.h"
#include "compute/gpu/sim/sim_runtime.h"
#include "compute/reference/f16_dot2.h"
#include "compute/reference/reference.h"
#include "compute/stored_experts.h"
#include "gpu/bounded_replies.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::Experts;
using toy::StoredExperts;
using toy::bounds_of;
using toy::count_outside;
using toy::reply_of;
using toy::source_of;
using toy::spec_of;

constexpr NumericsClass kClass = NumericsClass::kF16Dot2;

std::unique_ptr<ExpertLayer> layer_on_card(const FfnSpec& spec, uint32_t num_experts, ResidentFormats formats, uint64_t seed = 1) {
  auto device = std::make_shared<GpuDevice>(make_simulated_runtime({SimulatedVendor::kHip, uint64_t{1} << 28, seed}).value(), std::chrono::seconds(100));
  auto layer = GpuLayer::create(std::move(device), spec, num_experts, formats, kClass);
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

// The card against the twin: a row alone, tiles of few rows, tiles of many.
void check_format(const FfnSpec& spec, ResidentFormats formats, uint32_t seed) {
  const StoredExperts experts(spec, 2, source_of(formats.gate_up), source_of(formats.down), seed);
  const auto expected = twin(spec, 2, formats);
  const auto layer = layer_on_card(spec, 2, formats, seed);
  REQUIRE(experts.load_into(*expected).ok());
  REQUIRE(experts.load_into(*layer).ok());
  for (uint32_t rows : {1u, 3u, 37u}) {
    CAPTURE(format_name(formats.gate_up));
    CAPTURE(format_name(formats.down));
    CAPTURE(rows);
    const Batch batch = of_one_expert(spec, rows, seed + rows);
    CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
  }
}

TEST_CASE("f16-dot2: every format gives the twin's bits, in widths that end inside a chain, a step, a group or a panel where it has such") {
  uint32_t seed = 1;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    const uint32_t block = format_facts(source_of(format)).block;
    check_format(block == 256 ? spec_of(768, 256, 33) : block == 32 ? spec_of(288, 96, 33) : spec_of(301, 77, 33), format, ++seed);
  }
  struct Shape { uint32_t in, intermediate, out; };
  for (const Shape& shape : {Shape{1, 1, 1}, {7, 5, 3}, {33, 40, 65}, {129, 200, 65}, {257, 384, 40}, {600, 31, 97}}) {
    ++seed;
    check_format(spec_of(shape.in, shape.intermediate, shape.out), static_cast<WeightFormat>(seed % 3), seed);
  }
  check_format(spec_of(256, 288, 64), {WeightFormat::kQ4K, WeightFormat::kBF16}, 90);
}

TEST_CASE("f16-dot2: every number of rows, spread over experts, empty ones among them, or listed on the device, gives the twin's bits") {
  const FfnSpec spec = spec_of(290, 96, 100);
  const Experts experts(spec, 6, Dtype::kBF16, 5);
  const auto expected = twin(spec, 6, Dtype::kBF16);
  const auto layer = layer_on_card(spec, 6, Dtype::kBF16);
  REQUIRE(experts.load_into(*expected).ok());
  REQUIRE(experts.load_into(*layer).ok());
  for (uint32_t rows : {1u, 2u, 4u, 5u, 16u, 17u, 64u, 65u, 200u, 300u}) {
    CAPTURE(rows);
    Batch batch = Batch::random(spec, 5, rows, 4, rows);  // none goes to expert 5
    for (size_t i = 0; i < batch.ids.size(); i += 2) batch.ids[i] = 2;
    batch.row_dtype = static_cast<Dtype>(rows % 3);
    batch.reply_dtype = static_cast<Dtype>(rows / 3 % 3);
    CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
    CHECK((rows != 300 || batch.ids.size() > kMostHostPairs));
  }
}

TEST_CASE("f16-dot2: gates, activations and biases give the twin's bits, and replies within the bounds") {
  uint32_t seed = 100;
  for (int activation = 0; activation <= 7; ++activation) {
    for (int gate = 0; gate <= 2; ++gate) {
      FfnSpec spec = spec_of(300, 70, 50);
      spec.activation = static_cast<Activation>(activation);
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = spec.has_down_bias = ++seed % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu) spec.alpha = 1.702f, spec.up_offset = 1.0f, spec.gate_max = spec.up_limit = 0.5f;
      const Experts experts(spec, 2, Dtype::kF32, seed);
      const auto expected = twin(spec, 2, Dtype::kF32);
      const auto layer = layer_on_card(spec, 2, Dtype::kF32);
      REQUIRE(experts.load_into(*expected).ok());
      REQUIRE(experts.load_into(*layer).ok());
      Batch batch = Batch::random(spec, 2, seed % 3 == 0 ? 24 : 6, 2, seed);
      for (float& value : batch.rows) value *= 4.0f;  // into the tails of the activations
      CAPTURE(activation);
      CAPTURE(gate);
      const std::vector<std::byte> found = reply_of(*layer, batch);
      CHECK(found == reply_of(*expected, batch));
      CHECK(count_outside(bounds_of(kClass, spec, experts.all_weights(), Dtype::kF32, batch), found) == 0);
    }
  }
}

TEST_CASE("f16-dot2: no order of threads and blocks changes a bit, nor do the rows beside a row or the kernel that takes it") {
  const FfnSpec spec = spec_of(520, 100, 70);
  const ResidentFormats formats{WeightFormat::kBF16, WeightFormat::kF16};
  const StoredExperts experts(spec, 2, WeightFormat::kBF16, WeightFormat::kF16, 41);
  const Batch batch = of_one_expert(spec, 24, 42);
  std::vector<std::byte> expected;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const auto layer = layer_on_card(spec, 2, formats, seed);
    REQUIRE(experts.load_into(*layer).ok());
    const std::vector<std::byte> found = reply_of(*layer, batch);
    if (seed == 1) expected = found;
    CHECK(found == expected);
    for (uint32_t begin : {0u, 5u, 21u}) {  // slices of three rows, which the few-row kernels compute
      Batch slice = of_one_expert(spec, 3, 1);
      slice.rows.assign(batch.rows.begin() + begin * 520, batch.rows.begin() + (begin + 3) * 520);
      const std::vector<std::byte> part = reply_of(*layer, slice);
      CHECK(std::memcmp(part.data(), expected.data() + size_t{begin} * 70 * 4, part.size()) == 0);
    }
  }
}

TEST_CASE("f16-dot2: what a bf16 or f16 row and its weights hold comes through far beyond f16's range") {
  FfnSpec spec = spec_of(256, 64, 40);
  spec.gate = GateKind::kNone;
  spec.activation = Activation::kIdentity;
  for (float size : {0x1p-60f, 0x1p-30f, 1.0f, 0x1p40f}) {
    Batch batch = of_one_expert(spec, 20, 7);
    for (float& value : batch.rows) value *= size;
    const Experts experts(spec, 2, Dtype::kBF16, 8);
    const auto layer = layer_on_card(spec, 2, Dtype::kBF16);
    REQUIRE(experts.load_into(*layer).ok());
    batch.row_dtype = Dtype::kBF16;
    const std::vector<std::byte> found = reply_of(*layer, batch);
    std::vector<std::byte> unused;
    const std::vector<std::byte> rows = toy::encode(batch.row_dtype, batch.rows);
    const std::vector<double> exact = forward_float64(spec, experts.all_weights(), batch.args(rows, unused));
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < exact.size(); ++i) {
      float value;
      std::memcpy(&value, found.data() + 4 * i, 4);
      error += std::pow(static_cast<double>(value) - exact[i], 2);
      power += exact[i] * exact[i];
    }
    CAPTURE(size);
    CHECK(std::sqrt(error / power) < 0x1p-11);  // intermediate rows are rounded to 11 bits, uniformly: 2^-12 / sqrt(3) and less
  }
}

TEST_CASE("f16-dot2: zeros, subnormals, NaN and infinity stay in their own group or row, as the twin has them") {
  const FfnSpec spec = spec_of(96, 64, 40);
  const Experts experts(spec, 2, Dtype::kBF16, 31);
  const auto expected = twin(spec, 2, Dtype::kBF16);
  const auto layer = layer_on_card(spec, 2, Dtype::kBF16);
  REQUIRE(experts.load_into(*expected).ok());
  REQUIRE(experts.load_into(*layer).ok());
  Batch batch = Batch::random(spec, 2, 40, 3, 32);
  std::fill_n(batch.rows.begin(), 96, 0.0f);
  for (uint32_t i = 0; i < 32; ++i) batch.rows[2 * 96 + 32 + i] *= 0x1p-143f;
  batch.rows[3 * 96 + 5] = std::bit_cast<float>(0xffabcdefu);
  batch.rows[7 * 96 + 40] = -std::numeric_limits<float>::infinity();
  batch.rows[9 * 96 + 1] = 0x1p100f;
  for (Dtype dtype : {Dtype::kF32, Dtype::kBF16}) {
    batch.reply_dtype = dtype;
    CHECK(reply_of(*layer, batch) == reply_of(*expected, batch));
  }
}

TEST_CASE("f16-dot2: replies lie within the derived bounds in every format, and those of other rows do not") {
  uint32_t seed = 700;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    const FfnSpec spec = spec_of(512, 256, 60);
    const StoredExperts experts(spec, 2, source_of(format), source_of(format), ++seed);
    const Batch batch = Batch::random(spec, 2, 20, 2, seed);
    const OutputBounds bounds = bounds_of(kClass, spec, {experts.weights(0), experts.weights(1)}, format, batch);
    const auto layer = layer_on_card(spec, 2, format);
    REQUIRE(experts.load_into(*layer).ok());
    CAPTURE(format_name(format));
    std::vector<std::byte> shifted = reply_of(*layer, batch);
    CHECK(count_outside(bounds, shifted) == 0);
    std::rotate(shifted.begin(), shifted.begin() + 4 * spec.out_size, shifted.end());  // each row has the next one's
    CHECK(count_outside(bounds, shifted) > bounds.low.size() / 2);
  }
}

// Other instructions than the simulator's: what a card's might do with a pair.
float exact_pair(float a0, float b0, float a1, float b1, float sum) {
  return static_cast<float>(static_cast<double>(a0) * static_cast<double>(b0) + static_cast<double>(a1) * static_cast<double>(b1) + static_cast<double>(sum));
}
float second_first(float a0, float b0, float a1, float b1, float sum) { return std::fmaf(a0, b0, std::fmaf(a1, b1, sum)); }
float products_first(float a0, float b0, float a1, float b1, float sum) { return sum + std::fmaf(a0, b0, a1 * b1); }
float flushing(float a0, float b0, float a1, float b1, float sum) {
  const auto normal = [](float half) { return std::fabs(half) < 0x1p-14f ? 0.0f : half; };
  return second_first(normal(a0), normal(b0), normal(a1), normal(b1), sum);
}
// All three terms cut at the 24th bit of the largest, towards zero, and the sum too.
float truncating(float a0, float b0, float a1, float b1, float sum) {
  const double terms[] = {static_cast<double>(a0) * static_cast<double>(b0), static_cast<double>(a1) * static_cast<double>(b1), static_cast<double>(sum)};
  const double largest = std::max({std::fabs(terms[0]), std::fabs(terms[1]), std::fabs(terms[2])});
  if (largest == 0.0) return 0.0f;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  double total = 0.0;
  for (double term : terms) total += std::trunc(term / unit) * unit;
  const double last = total == 0.0 ? 1.0 : std::ldexp(1.0, std::ilogb(total) - 23);
  return static_cast<float>(std::trunc(total / last) * last);
}

TEST_CASE("f16-dot2: the bounds hold however an instruction adds a pair, flushed subnormals included") {
  using Pair = float (*)(float, float, float, float, float);
  constexpr Pair kPairs[] = {exact_pair, second_first, products_first, flushing, truncating};
  constexpr uint32_t kInputs = 96;
  FfnSpec spec = spec_of(kInputs, kInputs, 40);
  spec.gate = GateKind::kNone;
  spec.activation = Activation::kIdentity;
  const Experts experts(spec, 1, Dtype::kF32, 21);
  const ExpertWeights weights = experts.all_weights()[0];
  const HalfWeights matrices[] = {half_weights(weights.up, WeightFormat::kF32), half_weights(weights.down, WeightFormat::kF32)};
  Batch batch = Batch::random(spec, 1, 8, 1, 22);
  batch.row_counts.assign(8, 1);
  batch.ids.assign(8, 0);
  batch.weights.assign(8, 1.0f);
  for (size_t i = 0; i < batch.rows.size(); i += 3) batch.rows[i] *= 0x1p-30f;  // subnormal codes
  for (size_t i = 0; i < batch.rows.size(); i += 32) batch.rows[i] *= 0x1p12f;  // and sums that cancel little of one large term
  const OutputBounds bounds = bounds_of(kClass, spec, experts.all_weights(), Dtype::kF32, batch);
  size_t unlike = 0;
  for (Pair pair : kPairs) {
    std::vector<float> outputs;
    for (uint32_t r = 0; r < 8; ++r) {
      std::vector<float> values(batch.rows.begin() + r * kInputs, batch.rows.begin() + (r + 1) * kInputs);
      for (const HalfWeights& matrix : matrices) {
        const HalfCodes row = half_codes(values.data(), values.size());
        values.assign(matrix.codes.size() / kInputs, 0.0f);
        for (uint32_t o = 0; o < values.size(); ++o) {
          for (uint32_t group = 0; group < kInputs / 32; ++group) {
            const float* codes = matrix.codes.data() + o * kInputs + group * 32;
            float dot = 0.0f;
            for (uint32_t i = 0; i < 32; i += 2) dot = pair(codes[i], row.codes[group * 32 + i], codes[i + 1], row.codes[group * 32 + i + 1], dot);
            values[o] = std::fmaf(dot, matrix.scales[o * (kInputs / 32) + group] * row.scales[group], values[o]);
          }
          if (pair == kPairs[0] && values[o] != f16_dot2(matrix, o, row)) ++unlike;
        }
      }
      outputs.insert(outputs.end(), values.begin(), values.end());
    }
    std::vector<std::byte> reply(outputs.size() * 4);
    std::memcpy(reply.data(), outputs.data(), reply.size());
    CHECK(count_outside(bounds, reply) == 0);
  }
  CHECK(unlike > 0);  // else nothing was rounded in another way
}

TEST_CASE("records of rows of f16-dot2 hold the twin's codes, scales and sums, whatever the bits of the rows, and zeros behind their end") {
  constexpr uint32_t kRows = 6, kInputs = 301, kStride = 304;
  std::mt19937 random(77);
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    std::vector<float> values(kRows * kStride);
    for (uint32_t i = 0; i < values.size(); ++i) {
      const float unit = static_cast<float>(random() % 20001) / 10000.0f - 1.0f;
      values[i] = i / kStride == 4 ? std::bit_cast<float>(static_cast<uint32_t>(random())) : unit * std::exp2(static_cast<float>(i % 37) - 120.0f * (i / kStride == 3));
    }
    const std::vector<std::byte> source = toy::encode(dtype, values);
    widen(dtype, source.data(), values.data(), values.size());
    const auto runtime = make_simulated_runtime({SimulatedVendor::kHip, uint64_t{1} << 20, 3}).value();
    std::byte* in = runtime->allocate(source.size()).value();
    std::byte* out = runtime->allocate(kRows * half_row_bytes(kInputs)).value();
    std::vector<std::byte> records(kRows * half_row_bytes(kInputs));
    REQUIRE(runtime->copy_in(in, source.data(), source.size()).ok());
    const QuantizeParams params{in, reinterpret_cast<unsigned char*>(out), kRows, kInputs, kStride, dtype};
    REQUIRE(runtime->launch({.kernel = kernel_id(PlainKernel::k_halve_rows), .grid_x = kRows * 2 * 64 / 256 + 1, .threads = 256,
                             .params = &params, .params_bytes = sizeof(params)}).ok());
    REQUIRE(runtime->copy_out(records.data(), out, records.size()).ok());
    REQUIRE(runtime->wait(std::chrono::seconds(30)).value());
    for (uint32_t row = 0; row < kRows; ++row) {
      const HalfCodes expected = half_codes(values.data() + row * kStride, kInputs);
      for (uint32_t input = 0; input < 2 * kChain; ++input) {
        const std::byte* record = records.data() + row * half_row_bytes(kInputs) + input / kChain * kHalfRecordBytes;
        uint16_t code;
        std::memcpy(&code, record + 2 * (input % kChain), 2);
        REQUIRE(f16_to_f32(code) == (input < kInputs ? expected.codes[input] : 0.0f));
        if (input % 32 != 0 || input >= kInputs) continue;
        float scales[2];
        std::memcpy(&scales[0], record + 2 * kChain + input % kChain / 32 * 4, 4);
        std::memcpy(&scales[1], record + 2 * kChain + 32 + input % kChain / 32 * 4, 4);
        const float scale = expected.scales[input / 32];
        REQUIRE((scales[0] == scale || (std::isnan(scales[0]) && std::isnan(scale))));
        REQUIRE((scales[1] == scale * expected.sums[input / 32] || std::isnan(scale)));
      }
    }
  }
}

TEST_CASE("f16-dot2: AMD's cards offer it; others refuse it and name the classes that they have") {
  DeviceFacts facts;
  facts.backend = "hip";
  for (const char* architecture : {"gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201"}) {
    facts.architecture = architecture;
    CHECK(device_computes(facts, kClass));
  }
  facts.architecture = "gfx1010";
  CHECK_FALSE(device_computes(facts, kClass));
  facts = {};
  facts.backend = "cuda";
  facts.architecture = "sm_90";
  CHECK_FALSE(device_computes(facts, kClass));
  auto device = std::make_shared<GpuDevice>(make_simulated_runtime({SimulatedVendor::kCuda, uint64_t{1} << 20, 1}).value());
  const auto refused = GpuLayer::create(device, spec_of(32, 32, 32), 1, WeightFormat::kBF16, kClass);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().code == ErrorCode::kUnsupported);
  CHECK(refused.error().message.find("does not compute numerics class f16-dot2; it computes f32-canonical, int8-groups, bf16-mma") != std::string::npos);
}

}  // namespace
}  // namespace dflash::compute::gpu
