// Quantised weights: every instruction set gives the reference's bits in every format, through few
// rows and many, whatever the shape; damaged scales and formats that do not fit are refused.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cmath>

#include "compute/cpu/packed_experts.h"
#include "compute/formats/dequantize.h"
#include "failed.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::reply_of;
using toy::source_of;
using toy::spec_of;
using toy::StoredExperts;

const toy::Machines kMachines = toy::kernel_sets_of(NumericsClass::kF32Canonical);

std::vector<WeightFormat> quantized_formats() {
  std::vector<WeightFormat> formats;
  for (uint8_t value = kNumDtypes; value < kNumWeightFormats; ++value) {
    if (has_panels(static_cast<WeightFormat>(value)))
      formats.push_back(static_cast<WeightFormat>(value));
  }
  return formats;
}

TEST_CASE(
    "every format gives the reference's bits in every instruction set, for each number of rows up "
    "to a tile and beyond") {
  uint32_t seed = 1;
  for (WeightFormat format : quantized_formats())
    check_formats(kMachines, spec_of(512, 256, 70), format, ++seed, {1, 2, 3, 5, 8, 16, 33});
}

TEST_CASE(
    "widths that end inside a chain, a record, a group or a panel give the reference's bits") {
  uint32_t seed = 500;
  for (WeightFormat format : quantized_formats()) {
    const uint32_t block = format_facts(format).block;
    const bool any_width = !format_facts(format).is_stored || block == 1;
    if (block <= 32) check_formats(kMachines, spec_of(288, 96, 33), format, ++seed, {2, 12});
    if (any_width) check_formats(kMachines, spec_of(301, 37, 5), format, ++seed, {2, 12});
  }
}

TEST_CASE("more rows than one kernel call takes give the reference's bits") {
  for (WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBF16, WeightFormat::kQ4K, WeightFormat::kInt8G32}) {
    check_formats(kMachines, spec_of(256, 256, 48), format, 900, {250});
  }
}

TEST_CASE("gate and up in one format and down in another give the reference's bits") {
  const FfnSpec spec = spec_of(256, 256, 64);
  check_formats(kMachines, spec, {WeightFormat::kQ4K, WeightFormat::kQ6K}, 31, {7});
  check_formats(kMachines, spec, {WeightFormat::kQ5K, WeightFormat::kQ8_0}, 32, {2});
  check_formats(kMachines, spec_of(64, 256, 64), {WeightFormat::kF16, WeightFormat::kIq4Xs}, 33);
}

TEST_CASE("float32 panels hold every stored format exactly") {
  const FfnSpec spec = spec_of(256, 256, 40);
  for (WeightFormat format : quantized_formats()) {
    if (!format_facts(format).is_stored) continue;
    const StoredExperts experts(spec, 2, format, format, 77);
    const auto own = toy::layer_of(best_isa(), spec, 2, format),
               wide = toy::layer_of(best_isa(), spec, 2, WeightFormat::kF32);
    REQUIRE(experts.load_into(*own).ok());
    REQUIRE(experts.load_into(*wide).ok());
    const Batch batch = Batch::random(spec, 2, 6, 3, 78);
    CHECK(reply_of(*own, batch) == reply_of(*wide, batch));
    CHECK(own->resident_bytes() < wide->resident_bytes());
  }
}

TEST_CASE("resident bytes are the format's own, but for scales widened to bytes") {
  const FfnSpec spec = spec_of(1024, 1024, 1024);
  for (WeightFormat format : quantized_formats()) {
    const FormatFacts& facts = format_facts(format);
    const uint64_t outputs = 3 * 1024;
    uint64_t stored = outputs * row_bytes(format, 1024);
    if (facts.scale_bytes != 0)
      stored += outputs / facts.scale_outputs * (1024 / facts.scale_inputs) * facts.scale_bytes;
    CAPTURE(facts.name);
    for (uint32_t width : {2u, 16u, 32u}) {
      const uint64_t predicted = PackedExperts::predicted_bytes(spec, 1, format, width);
      CHECK(predicted >= stored);
      CHECK(static_cast<double>(predicted) <= 1.037 * static_cast<double>(stored));
    }
  }
}

TEST_CASE("integers made at load are the nearest ones and zeros stay zeros") {
  std::vector<float> values(70);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i)) * 0.3f;
  std::fill(values.begin() + 32, values.begin() + 64, 0.0f);
  for (const auto& [format, limit] :
       {std::pair(WeightFormat::kInt8G32, 127.0f), std::pair(WeightFormat::kInt4G32, 7.0f)}) {
    std::vector<float> held = values;
    requantize_row(format, held.data(), 70);
    for (size_t begin = 0; begin < 70; begin += 32) {
      const size_t end = std::min<size_t>(begin + 32, 70);
      float largest = 0;
      for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(values[i]));
      for (size_t i = begin; i < end; ++i)
        CHECK(std::fabs(held[i] - values[i]) <= 0.5001f * largest / limit);
    }
    CHECK(held[40] == 0.0f);
  }
}

TEST_CASE("NaN or infinity among scales, or among floats to be quantised, names the tensor") {
  const FfnSpec spec = spec_of(256, 256, 32);
  YieldingProgress progress{0};
  for (WeightFormat format : quantized_formats()) {
    StoredExperts experts(spec, 1, source_of(format), source_of(format), 5);
    experts.damage_down(17);
    for (Isa isa : {Isa::kReference, best_isa()}) {
      CAPTURE(format_name(format));
      CHECK(toy::layer_of(isa, spec, 1, format)->load_expert(0, experts.weights(0), progress) ==
            Failed(ErrorCode::kCheckpoint, "down: output 17, input "));
    }
  }
}

TEST_CASE(
    "a format that cannot hold the source, a width it cannot cut and scales that are missing are "
    "refused") {
  YieldingProgress progress{0};
  const auto load = [&](const FfnSpec& spec, WeightFormat resident, const ExpertWeights& weights) {
    return toy::layer_of(Isa::kScalar, spec, 1, resident)->load_expert(0, weights, progress);
  };
  const FfnSpec spec = spec_of(256, 256, 32);
  const StoredExperts stored(spec, 1, WeightFormat::kQ4_0, WeightFormat::kQ4_0, 3);
  CHECK(load(spec, WeightFormat::kQ8_0, stored.weights(0)) == Failed(ErrorCode::kUnsupported));
  CHECK(load(spec, WeightFormat::kInt8G32, stored.weights(0)) ==
        Failed(ErrorCode::kUnsupported, "cannot hold exactly"));
  ExpertWeights narrow = stored.weights(0);
  narrow.gate.inputs = narrow.up.inputs = 250;
  CHECK(load(spec_of(250, 256, 32), WeightFormat::kQ4_0, narrow) ==
        Failed(ErrorCode::kUnsupported, "needs a multiple of 32"));
  const StoredExperts squares(spec, 1, WeightFormat::kFp8E4m3B128, WeightFormat::kFp8E4m3B128, 4);
  ExpertWeights bare = squares.weights(0);
  bare.up.scales = nullptr;
  CHECK(load(spec, WeightFormat::kFp8E4m3B128, bare).error().message ==
        "up in fp8_e4m3_b128 lacks its scales");
  CHECK_FALSE(parse_weight_format("q8_k").ok());
  CHECK(parse_resident_formats("q4_k+q6_k").value() ==
        ResidentFormats(WeightFormat::kQ4K, WeightFormat::kQ6K));
  CHECK_FALSE(parse_resident_formats("q4_k+").ok());
}

}  // namespace
}  // namespace dflash::compute
