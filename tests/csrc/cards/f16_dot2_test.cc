// Class f16-dot2 on the simulated HIP device: the twin's bits over formats, widths, rows and orders
// of threads; replies within the derived bounds, which hold for other roundings of the instruction
// too; and who offers the class.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "cards/card_scene.h"
#include "cards/host_routing.h"
#include "cards/kernel_table.h"
#include "compute/reference/f16_dot2.h"
#include "failed.h"

namespace dflash::compute::gpu {
namespace {

using toy::Batch;
using toy::bounds_of;
using toy::count_outside;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;
using toy::StoredExperts;
using toy::Twins;

constexpr NumericsClass kClass = NumericsClass::kF16Dot2;
constexpr Card kCard{SimulatedVendor::kHip, kClass};
const toy::Machines kMachines = cards_of(kClass, {kCard.vendor});

TEST_CASE(
    "f16-dot2: every format gives the twin's bits, in widths that end inside a chain, a step, a "
    "group or a panel where it has such") {
  uint32_t seed = 1;
  for (WeightFormat format : kCardFormats)
    check_formats(kMachines, toy::uneven_spec_of(format), format, ++seed);
  const std::vector<toy::Shape> shapes = {
      {1,   1,   1 },
      {7,   5,   3 },
      {33,  40,  65},
      {129, 200, 65},
      {257, 384, 40},
      {600, 31,  97}
  };
  check_shapes(kMachines, shapes, {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kBF16});
  check_formats(kMachines, spec_of(256, 288, 64), {WeightFormat::kQ4K, WeightFormat::kBF16}, 90);
}

TEST_CASE(
    "f16-dot2: every number of rows, spread over experts, empty ones among them, or listed on the "
    "device, gives the twin's bits") {
  const Experts experts(spec_of(290, 96, 100), 6, Dtype::kBF16, 5);
  check_numbers_of_rows(kMachines, experts, Dtype::kBF16, {1, 2, 4, 5, 16, 17, 64, 65, 200});
  Batch batch = Batch::random(experts.spec(), 5, 300, 4, 300);  // none goes to expert 5
  for (size_t i = 0; i < batch.ids.size(); i += 2) batch.ids[i] = 2;
  CHECK(batch.ids.size() > kMostHostPairs);
  Twins(kMachines, experts, Dtype::kBF16).check(batch);
}

TEST_CASE(
    "f16-dot2: gates, activations and biases give the twin's bits, and replies within the bounds") {
  for_every_activation({kCard}, 100,
                       [](const Twins& twins, const OutputBounds& bounds, const Batch& batch) {
                         twins.check(batch);
                         CHECK(count_outside(bounds, reply_of(twins.twin(), batch)) == 0);
                       });
}

TEST_CASE(
    "f16-dot2: no order of threads and blocks changes a bit, nor do the rows beside a row or the "
    "kernel that takes it") {
  const StoredExperts experts(spec_of(520, 100, 70), 2, WeightFormat::kBF16, WeightFormat::kF16,
                              41);
  const std::vector<SimulatedVendor> four(4, kCard.vendor);
  Twins(cards_of(kClass, four), experts, {WeightFormat::kBF16, WeightFormat::kF16})
      .check_slices(Batch::of_one_expert(experts.spec(), 24, 1, 42));
}

TEST_CASE(
    "f16-dot2: what a bf16 or f16 row and its weights hold comes through far beyond f16's range") {
  FfnSpec spec = spec_of(256, 64, 40);
  spec.gate = GateKind::kNone;
  spec.activation = Activation::kIdentity;
  for (float size : {0x1p-60f, 0x1p-30f, 1.0f, 0x1p40f}) {
    Batch batch = Batch::of_one_expert(spec, 20, 1, 7);
    for (float& value : batch.rows) value *= size;
    const Experts experts(spec, 2, Dtype::kBF16, 8);
    const auto layer = layer_on(kCard, spec, 2, Dtype::kBF16);
    REQUIRE(experts.load_into(*layer).ok());
    batch.row_dtype = Dtype::kBF16;
    const std::vector<std::byte> found = reply_of(*layer, batch);
    std::vector<std::byte> unused;
    const std::vector<std::byte> rows = toy::encode(batch.row_dtype, batch.rows);
    const std::vector<double> exact =
        forward_float64(spec, experts.all_weights(), batch.args(rows, unused));
    double error = 0.0, power = 0.0;
    for (size_t i = 0; i < exact.size(); ++i) {
      float value;
      std::memcpy(&value, found.data() + 4 * i, 4);
      error += std::pow(static_cast<double>(value) - exact[i], 2);
      power += exact[i] * exact[i];
    }
    CAPTURE(size);
    // intermediate rows are rounded to 11 bits, uniformly: 2^-12 / sqrt(3) and less
    CHECK(std::sqrt(error / power) < 0x1p-11);
  }
}

TEST_CASE(
    "f16-dot2: zeros, subnormals, NaN and infinity stay in their own group or row, as the twin has "
    "them") {
  check_special_values(kMachines, Dtype::kBF16, 0x1p100f);
}

TEST_CASE(
    "f16-dot2: replies lie within the derived bounds in every format, and those of other rows do "
    "not") {
  check_bounds({kCard}, 700);
}

// Other instructions than the simulator's: what a card's might do with a pair.
double product(float a, float b) { return static_cast<double>(a) * static_cast<double>(b); }
float exact_pair(float a0, float b0, float a1, float b1, float sum) {
  return static_cast<float>(product(a0, b0) + product(a1, b1) + static_cast<double>(sum));
}
float second_first(float a0, float b0, float a1, float b1, float sum) {
  return std::fmaf(a0, b0, std::fmaf(a1, b1, sum));
}
float products_first(float a0, float b0, float a1, float b1, float sum) {
  return sum + std::fmaf(a0, b0, a1 * b1);
}
float flushing(float a0, float b0, float a1, float b1, float sum) {
  const auto normal = [](float half) { return std::fabs(half) < 0x1p-14f ? 0.0f : half; };
  return second_first(normal(a0), normal(b0), normal(a1), normal(b1), sum);
}
// All three terms cut at the 24th bit of the largest, towards zero, and the sum too.
float truncating(float a0, float b0, float a1, float b1, float sum) {
  const double terms[] = {product(a0, b0), product(a1, b1), static_cast<double>(sum)};
  const double largest = std::max({std::fabs(terms[0]), std::fabs(terms[1]), std::fabs(terms[2])});
  if (largest == 0.0) return 0.0f;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  double total = 0.0;
  for (double term : terms) total += std::trunc(term / unit) * unit;
  const double last = total == 0.0 ? 1.0 : std::ldexp(1.0, std::ilogb(total) - 23);
  return static_cast<float>(std::trunc(total / last) * last);
}

TEST_CASE(
    "f16-dot2: the bounds hold however an instruction adds a pair, flushed subnormals included") {
  using Pair = float (*)(float, float, float, float, float);
  constexpr Pair kPairs[] = {exact_pair, second_first, products_first, flushing, truncating};
  constexpr uint32_t kInputs = 96;
  FfnSpec spec = spec_of(kInputs, kInputs, 40);
  spec.gate = GateKind::kNone;
  spec.activation = Activation::kIdentity;
  const Experts experts(spec, 1, Dtype::kF32, 21);
  const ExpertWeights weights = experts.all_weights()[0];
  const HalfWeights matrices[] = {half_weights(weights.up, WeightFormat::kF32),
                                  half_weights(weights.down, WeightFormat::kF32)};
  Batch batch = Batch::of_one_expert(spec, 8, 0, 22, 1.0f);
  for (size_t i = 0; i < batch.rows.size(); i += 3) batch.rows[i] *= 0x1p-30f;  // subnormal codes
  // and sums that cancel little of one large term
  for (size_t i = 0; i < batch.rows.size(); i += 32) batch.rows[i] *= 0x1p12f;
  const OutputBounds bounds = bounds_of(kClass, spec, experts.all_weights(), Dtype::kF32, batch);
  size_t unlike = 0;
  for (Pair pair : kPairs) {
    std::vector<float> outputs;
    for (uint32_t r = 0; r < 8; ++r) {
      std::vector<float> values(batch.rows.begin() + r * kInputs,
                                batch.rows.begin() + (r + 1) * kInputs);
      for (const HalfWeights& matrix : matrices) {
        const HalfCodes row = half_codes(values.data(), values.size());
        values.assign(matrix.codes.size() / kInputs, 0.0f);
        for (uint32_t o = 0; o < values.size(); ++o) {
          for (uint32_t group = 0; group < kInputs / 32; ++group) {
            const float* codes = matrix.codes.data() + o * kInputs + group * 32;
            float dot = 0.0f;
            for (uint32_t i = 0; i < 32; i += 2)
              dot = pair(codes[i], row.codes[group * 32 + i], codes[i + 1],
                         row.codes[group * 32 + i + 1], dot);
            values[o] = std::fmaf(
                dot, matrix.scales[o * (kInputs / 32) + group] * row.scales[group], values[o]);
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

TEST_CASE(
    "records of rows of f16-dot2 hold the twin's codes, scales and sums, whatever the bits of the "
    "rows, and zeros behind their end") {
  static constexpr uint32_t kInputs = 301;
  const RowRecords made{kernel_id(PlainKernel::k_halve_rows), kInputs, half_row_bytes(kInputs), 37,
                        120.0f};
  check_row_records(SimulatedVendor::kHip, made, [](const std::byte* records, const float* values) {
    const HalfCodes expected = half_codes(values, kInputs);
    for (uint32_t input = 0; input < 2 * kChain; ++input) {
      const std::byte* record = records + input / kChain * kHalfRecordBytes;
      uint16_t code;
      std::memcpy(&code, record + 2 * (input % kChain), 2);
      REQUIRE(f16_to_f32(code) == (input < kInputs ? expected.codes[input] : 0.0f));
      if (input % 32 == 0 && input < kInputs) {
        check_scales(record + 2 * kChain + input % kChain / 32 * 4, expected.scales[input / 32],
                     expected.sums[input / 32]);
      }
    }
  });
}

TEST_CASE("f16-dot2: AMD's cards offer it; others refuse it and name the classes that they have") {
  DeviceFacts facts;
  facts.backend = "hip";
  for (const char* architecture :
       {"gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201"}) {
    facts.architecture = architecture;
    CHECK(device_computes(facts, kClass));
  }
  facts.architecture = "gfx1010";
  CHECK_FALSE(device_computes(facts, kClass));
  facts = {};
  facts.backend = "cuda";
  facts.architecture = "sm_90";
  CHECK_FALSE(device_computes(facts, kClass));
  const char* offered =
      "does not compute numerics class f16-dot2; it computes f32-canonical, int8-groups, bf16-mma";
  CHECK(GpuLayer::create(device_of({}), spec_of(32, 32, 32), 1, WeightFormat::kBF16, kClass) ==
        Failed(ErrorCode::kUnsupported, offered));
}

}  // namespace
}  // namespace dflash::compute::gpu
