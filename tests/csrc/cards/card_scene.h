// Layers of a simulated card beside their class's reference twin, and what every class of cards is
// held to: the twin's bits for few and many rows, in any order of threads, whatever lies beside a
// row and in it; replies within the class's bounds.
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
#include "compute/stored_experts.h"

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

// A card's layer and its twin, of the same experts.
struct Twins {
  std::unique_ptr<ExpertLayer> reference, card;
};

template <class Weights>
Twins twins_of(const Card& card, const FfnSpec& spec, uint32_t num_experts, ResidentFormats formats,
               const Weights& experts, uint64_t seed = 1) {
  Twins twins{make_reference_layer(spec, num_experts, formats, card.numerics),
              layer_on(card, spec, num_experts, formats, seed)};
  REQUIRE(experts.load_into(*twins.reference).ok());
  REQUIRE(experts.load_into(*twins.card).ok());
  return twins;
}

inline void check_same(const Twins& twins, const toy::Batch& batch) {
  CHECK(toy::reply_of(*twins.card, batch) == toy::reply_of(*twins.reference, batch));
}

// Rows that all go to expert `id` alone: of so many of one expert as the kernels see.
inline toy::Batch to_one_expert(const FfnSpec& spec, uint32_t rows, uint16_t id, uint32_t seed) {
  toy::Batch batch = toy::Batch::random(spec, 1, rows, 1, seed);
  batch.row_counts.assign(rows, 1);
  batch.ids.assign(rows, id);
  batch.weights.assign(rows, 0.75f);
  return batch;
}

// A spec whose widths end inside a chain, a step, a group or a panel, as far as blocks of `format`
// allow.
inline FfnSpec uneven_spec_of(WeightFormat format) {
  const uint32_t block = format_facts(toy::source_of(format)).block;
  return block == 256  ? toy::spec_of(768, 256, 33)
         : block == 32 ? toy::spec_of(288, 96, 33)
                       : toy::spec_of(301, 77, 33);
}

// A row alone, tiles of few rows, tiles of many.
inline void check_format(const Card& card, const FfnSpec& spec, ResidentFormats formats,
                         uint32_t seed) {
  const toy::StoredExperts experts(spec, 2, toy::source_of(formats.gate_up),
                                   toy::source_of(formats.down), seed);
  const Twins twins = twins_of(card, spec, 2, formats, experts, seed);
  for (uint32_t rows : {1u, 3u, 37u}) {
    CAPTURE(format_name(formats.gate_up));
    CAPTURE(format_name(formats.down));
    CAPTURE(numerics_name(card.numerics));
    CAPTURE(rows);
    check_same(twins, to_one_expert(spec, rows, 1, seed + rows));
  }
}

// Four orders of threads and blocks, of cards in turn, and slices of three rows, which the few-row
// kernels compute.
inline void check_orders_and_slices(const std::vector<Card>& cards, const FfnSpec& spec,
                                    ResidentFormats formats) {
  const toy::StoredExperts experts(spec, 2, toy::source_of(formats.gate_up),
                                   toy::source_of(formats.down), 41);
  const toy::Batch batch = to_one_expert(spec, 24, 1, 42);
  std::vector<std::byte> expected;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    const auto layer = layer_on(cards[seed % cards.size()], spec, 2, formats, seed);
    REQUIRE(experts.load_into(*layer).ok());
    const std::vector<std::byte> found = toy::reply_of(*layer, batch);
    if (seed == 1) expected = found;
    CHECK(found == expected);
    for (uint32_t begin : {0u, 5u, 21u}) {
      toy::Batch slice = to_one_expert(spec, 3, 1, 1);
      slice.rows.assign(batch.rows.begin() + begin * spec.in_size,
                        batch.rows.begin() + (begin + 3) * spec.in_size);
      const std::vector<std::byte> part = toy::reply_of(*layer, slice);
      CHECK(std::memcmp(part.data(), expected.data() + size_t{begin} * spec.out_size * 4,
                        part.size()) == 0);
    }
  }
}

// Zeros, subnormals, NaN, infinity and a `huge` value, each in a row or group of its own.
inline void check_special_values(const Card& card, ResidentFormats formats, float huge) {
  const FfnSpec spec = toy::spec_of(96, 64, 40);
  const toy::Experts experts(spec, 2, Dtype::kBF16, 31);
  const Twins twins = twins_of(card, spec, 2, formats, experts);
  toy::Batch batch = toy::Batch::random(spec, 2, 40, 3, 32);
  std::fill_n(batch.rows.begin(), 96, 0.0f);
  for (uint32_t i = 0; i < 32; ++i) batch.rows[2 * 96 + 32 + i] *= 0x1p-143f;
  batch.rows[3 * 96 + 5] = std::bit_cast<float>(0xffabcdefu);
  batch.rows[7 * 96 + 40] = -std::numeric_limits<float>::infinity();
  batch.rows[9 * 96 + 1] = huge;
  for (Dtype dtype : {Dtype::kF32, Dtype::kBF16}) {
    batch.reply_dtype = dtype;
    check_same(twins, batch);
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

// Every activation and gate, with and without biases, rows reaching into the tails: `check(twins,
// bounds, batch)` demands.
template <class Check>
void for_every_activation(const std::vector<Card>& cards, uint32_t seed, const Check& check) {
  for (int activation = 0; activation <= 7; ++activation) {
    for (int gate = 0; gate <= 2; ++gate) {
      FfnSpec spec = toy::spec_of(300, 70, 50);
      spec.activation = static_cast<Activation>(activation);
      spec.gate = static_cast<GateKind>(gate);
      spec.has_gate_up_bias = spec.has_down_bias = ++seed % 2 == 0;
      if (spec.gate == GateKind::kClampedSwiglu)
        spec.alpha = 1.702f, spec.up_offset = 1.0f, spec.gate_max = spec.up_limit = 0.5f;
      const toy::Experts experts(spec, 2, Dtype::kF32, seed);
      toy::Batch batch = toy::Batch::random(spec, 2, seed % 3 == 0 ? 24 : 6, 2, seed);
      for (float& value : batch.rows) value *= 4.0f;
      CAPTURE(activation);
      CAPTURE(gate);
      check(twins_of(cards[seed % cards.size()], spec, 2, Dtype::kF32, experts),
            toy::bounds_of(cards[0].numerics, spec, experts.all_weights(), Dtype::kF32, batch),
            batch);
    }
  }
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
