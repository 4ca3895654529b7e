// Layers of simulated cards, and what the classes of cards are held to beyond compute/twins.h:
// replies within the class's bounds, and records of rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cards/bounded_replies.h"
#include "cards/gpu_layer.h"
#include "cards/kernel_table.h"
#include "cards/record_layout.h"
#include "cards/sim/sim_runtime.h"
#include "compute/reference/reference.h"
#include "compute/twins.h"

namespace dflash::compute::gpu {

inline constexpr SimulatedVendor kVendors[] = {SimulatedVendor::kCuda, SimulatedVendor::kHip};
inline constexpr uint64_t kCardBytes = uint64_t{1} << 28;

// Whose card, and the class that it computes.
struct Card {
  SimulatedVendor vendor;
  NumericsClass numerics;
};

inline std::shared_ptr<GpuDevice> device_of(const SimulatedDevice& facts) {
  return std::make_shared<GpuDevice>(make_simulated_runtime(facts).value(),
                                     std::chrono::seconds(100));
}

inline std::unique_ptr<ExpertLayer> layer_on(
    std::shared_ptr<GpuDevice> device, const FfnSpec& spec, uint32_t num_experts,
    ResidentFormats formats, NumericsClass numerics = NumericsClass::kF32Canonical) {
  auto layer = GpuLayer::create(std::move(device), spec, num_experts, formats, numerics);
  REQUIRE_MESSAGE(layer.ok(), (layer.ok() ? "" : layer.error().message));
  return std::move(layer).value();
}

inline std::unique_ptr<ExpertLayer> layer_on(const Card& card, const FfnSpec& spec,
                                             uint32_t num_experts, ResidentFormats formats,
                                             uint64_t seed = 1) {
  return layer_on(device_of({card.vendor, kCardBytes, seed}), spec, num_experts, formats,
                  card.numerics);
}

// Cards of one class, of which each runs threads and blocks in other orders than the others, and
// every layer in another one than the layer before.
inline toy::Machines cards_of(NumericsClass numerics, const std::vector<SimulatedVendor>& vendors) {
  toy::Machines machines{numerics, {}};
  for (SimulatedVendor vendor : vendors) {
    const Card card{vendor, numerics};
    machines.all.push_back(
        {vendor == SimulatedVendor::kCuda ? "cuda" : "hip",
         [card, seed = uint64_t{machines.all.size()}](const FfnSpec& spec, uint32_t num_experts,
                                                      ResidentFormats formats) mutable {
           return std::shared_ptr<ExpertLayer>(layer_on(card, spec, num_experts, formats, ++seed));
         }});
  }
  return machines;
}

// A card whose scratch takes some 15 pairs of rows of 64 values.
inline toy::Machines card_of_little_scratch(NumericsClass numerics) {
  const auto create = [numerics](const FfnSpec& spec, uint32_t num_experts,
                                 ResidentFormats formats) {
    const auto device = std::make_shared<GpuDevice>(make_simulated_runtime({}).value(),
                                                    std::chrono::seconds(100), 16384);
    return std::shared_ptr<ExpertLayer>(layer_on(device, spec, num_experts, formats, numerics));
  };
  return {numerics, {{"cuda with little scratch", create}}};
}

// Zeros, subnormals, NaN, infinity and a `huge` value, each in a row or group of its own.
inline void check_special_values(const toy::Machines& cards, ResidentFormats formats, float huge) {
  const toy::Experts experts(toy::spec_of(96, 64, 40), 2, Dtype::kBF16, 31);
  const toy::Twins twins(cards, experts, formats);
  toy::Batch batch = toy::Batch::random(experts.spec(), 2, 40, 3, 32);
  std::fill_n(batch.rows.begin(), 96, 0.0f);
  for (uint32_t i = 0; i < 32; ++i) batch.rows[2 * 96 + 32 + i] *= 0x1p-143f;
  batch.rows[3 * 96 + 5] = std::bit_cast<float>(0xffabcdefu);
  batch.rows[7 * 96 + 40] = -std::numeric_limits<float>::infinity();
  batch.rows[9 * 96 + 1] = huge;
  for (Dtype dtype : {Dtype::kF32, Dtype::kBF16}) {
    batch.reply_dtype = dtype;
    twins.check(batch);
  }
}

// Every format within the bounds of its class, and the replies of other rows not.
inline void check_bounds(const std::vector<Card>& cards, uint32_t seed) {
  for (WeightFormat format : kCardFormats) {
    const FfnSpec spec = toy::spec_of(512, 256, 60);
    const toy::StoredExperts experts(spec, 2, toy::source_of(format), toy::source_of(format),
                                     ++seed);
    const toy::Batch batch = toy::Batch::random(spec, 2, 20, 2, seed);
    const Card& card = cards[seed % cards.size()];
    const OutputBounds bounds = toy::bounds_of(
        card.numerics, spec, {experts.weights(0), experts.weights(1)}, format, batch);
    const auto layer = layer_on(card, spec, 2, format);
    REQUIRE(experts.load_into(*layer).ok());
    CAPTURE(format_name(format));
    std::vector<std::byte> shifted = toy::reply_of(*layer, batch);
    CHECK(toy::count_outside(bounds, shifted) == 0);
    // each row has the next one's
    std::rotate(shifted.begin(), shifted.begin() + 4 * spec.out_size, shifted.end());
    CHECK(toy::count_outside(bounds, shifted) > bounds.low.size() / 2);
  }
}

// Every activation and gate, with and without biases and limits, of cards in turn, rows reaching
// into the tails: `check(twins, bounds, batch)` demands.
template <class Check>
void for_every_activation(const std::vector<Card>& cards, uint32_t first_seed, const Check& check) {
  const auto body = [&](const FfnSpec& spec, uint32_t seed) {
    const toy::Experts experts(spec, 2, Dtype::kF32, seed);
    toy::Batch batch = toy::Batch::random(spec, 2, seed % 3 == 0 ? 24 : 6, 2, seed);
    for (float& value : batch.rows) value *= 4.0f;
    const Card& card = cards[seed % cards.size()];
    check(toy::Twins(cards_of(card.numerics, {card.vendor}), experts, Dtype::kF32),
          toy::bounds_of(card.numerics, spec, experts.all_weights(), Dtype::kF32, batch), batch);
  };
  toy::for_every_gate(toy::spec_of(300, 70, 50), toy::all_activations(), first_seed, body);
}

// The scale of a group of a row's record, and 32 bytes on its product with the sum of the group's
// codes.
inline void check_scales(const std::byte* at, float scale, float sum) {
  float found[2];
  std::memcpy(&found[0], at, 4);
  std::memcpy(&found[1], at + 32, 4);
  REQUIRE((found[0] == scale || (std::isnan(found[0]) && std::isnan(scale))));
  REQUIRE((found[1] == scale * sum || std::isnan(scale)));
}

// A kernel that makes records of rows, and what to try it with: rows of floats of `exponents`
// sizes, one of them 2^-`shrink` smaller, and one row of any bits. `has_row(records, values)`
// judges each.
struct RowRecords {
  KernelId kernel;
  uint32_t num_inputs;
  uint64_t row_bytes;
  uint32_t exponents;
  float shrink;
};
template <class HasRow>
void check_row_records(SimulatedVendor vendor, const RowRecords& made, const HasRow& has_row) {
  constexpr uint32_t kRows = 6;
  const uint32_t stride = made.num_inputs + 3;
  std::mt19937 random(77);
  for (Dtype dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
    std::vector<float> values(kRows * stride);
    for (uint32_t i = 0; i < values.size(); ++i) {
      const float unit = static_cast<float>(random() % 20001) / 10000.0f - 1.0f;
      values[i] = i / stride == 4 ? std::bit_cast<float>(static_cast<uint32_t>(random()))
                                  : unit * std::exp2(static_cast<float>(i % made.exponents) -
                                                     made.shrink * (i / stride == 3));
    }
    const std::vector<std::byte> source = toy::encode(dtype, values);
    widen(dtype, source.data(), values.data(), values.size());
    const auto runtime = make_simulated_runtime({vendor, uint64_t{1} << 20, 3}).value();
    std::byte* in = runtime->allocate(source.size()).value();
    std::byte* out = runtime->allocate(kRows * made.row_bytes).value();
    std::vector<std::byte> records(kRows * made.row_bytes);
    REQUIRE(runtime->copy_in(in, source.data(), source.size()).ok());
    const QuantizeParams params{
        in, reinterpret_cast<unsigned char*>(out), kRows, made.num_inputs, stride, dtype};
    REQUIRE(runtime
                ->launch({.kernel = made.kernel,
                          .grid_x = kRows * 2 * 64 / 256 + 1,
                          .threads = 256,
                          .params = &params,
                          .params_bytes = sizeof(params)})
                .ok());
    REQUIRE(runtime->copy_out(records.data(), out, records.size()).ok());
    REQUIRE(runtime->wait(std::chrono::seconds(30)).value());
    for (uint32_t row = 0; row < kRows; ++row)
      has_row(records.data() + row * made.row_bytes, values.data() + row * stride);
  }
}

}  // namespace dflash::compute::gpu
