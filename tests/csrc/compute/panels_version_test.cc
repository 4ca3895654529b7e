// The bytes of panels in every layout: files of panels outlive the program that wrote them. Who
// changes a byte on purpose raises kPanelsVersion and writes the new sums here.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <vector>

#include "base/checksum.h"
#include "base/float_mode.h"
#include "compute/cpu/panels/pack.h"
#include "compute/formats/value_checks.h"
#include "stored_experts.h"
#include "twins.h"

namespace dflash::compute {
namespace {

// Two whole panels of 32, and a part of one.
constexpr uint32_t kOutputs = 70, kInputs = 256;

// Floats that every machine makes alike.
std::vector<std::byte> floats(WeightFormat format, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i)
    values[i] = static_cast<float>(static_cast<int>(i * 131 % 509) - 254) / 256.0F;
  return toy::encode(format == WeightFormat::kF16    ? Dtype::kF16
                     : format == WeightFormat::kBF16 ? Dtype::kBF16
                                                     : Dtype::kF32,
                     values);
}

// The sum of all panels of a matrix in each format, one after another.
uint64_t sum_of_panels(uint32_t width, bool has_pairs) {
  const CanonicalFloatMode mode;  // because quantising rounds
  const FfnSpec spec = toy::spec_of(kInputs, kInputs, kOutputs);
  uint64_t sum = 0;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (!has_panels(format) || (has_pairs && format != WeightFormat::kBF16)) continue;
    const auto stored = format_facts(format).is_stored ? format : WeightFormat::kF32;
    const toy::StoredExperts experts(spec, 1, stored, stored, 300u + value);
    MatrixView matrix = experts.weights(0).down;
    const std::vector<std::byte> own = floats(stored, size_t{kOutputs} * kInputs);
    if (is_float(stored)) matrix = {own.data(), stored, kOutputs, kInputs, kInputs, 1};
    std::vector<std::byte> panel(panel_bytes(panel_format(format), kInputs, width));
    for (uint32_t number = 0; number * width < kOutputs; ++number) {
      const auto pack = has_pairs ? pack_bf16_pairs : pack_panel;
      pack(matrix, panel_format(format), number, width, panel.data());
      sum = mix_bits(sum ^ checksum(panel));
    }
  }
  return sum;
}

// The sum of what a layer keeps of an expert: the order of its panels, and its biases.
uint64_t sum_of_expert(GateKind gate) {
  FfnSpec spec = toy::spec_of(64, 46, 70);
  spec.gate = gate;
  spec.has_gate_up_bias = spec.has_down_bias = true;
  const std::vector<std::byte> bytes = floats(WeightFormat::kF32, size_t{70} * 64);
  const auto matrix = [&](uint32_t outputs, uint32_t inputs) {
    return MatrixView{bytes.data(), WeightFormat::kF32, outputs, inputs, inputs, 1};
  };
  const auto vector = [&](uint32_t count) {
    return VectorView{bytes.data(), Dtype::kF32, count, 1};
  };
  ExpertWeights weights{{}, matrix(46, 64), matrix(70, 46), {}, vector(46), vector(70)};
  if (gate == GateKind::kGated) {
    weights.gate = matrix(46, 64);
    weights.gate_bias = vector(46);
  }
  const auto layer = toy::layer_of(Isa::kScalar, spec, 1, Dtype::kF32, kDefaultNumerics, 1);
  YieldingProgress progress{0};
  REQUIRE(layer->load_expert(0, weights, progress).ok());
  Checksum sum;
  for (const auto& piece : layer->resident_pieces(0)) sum.update(piece);
  return sum.finish();
}

TEST_CASE("the bytes of panels are those of version 1") {
  CHECK(kPanelsVersion == 1);
  CHECK(sum_of_panels(2, false) == 1251141124583415812);
  CHECK(sum_of_panels(8, false) == 12508630360262552226u);
  CHECK(sum_of_panels(16, false) == 14215070895046716006u);
  CHECK(sum_of_panels(32, false) == 8134720922348645953);
  CHECK(sum_of_panels(8, true) == 8380659504388602140);
  CHECK(sum_of_panels(32, true) == 7649596569524411128);
  CHECK(sum_of_expert(GateKind::kGated) == 322755646);
  CHECK(sum_of_expert(GateKind::kNone) == 582156969);
}

}  // namespace
}  // namespace dflash::compute
