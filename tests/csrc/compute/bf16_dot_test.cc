// bf16-dot and bf16-bfdot, whichever this kind of processor has: kernels give the twin's bits over
// shapes, rows, threads and specials.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <limits>

#include "compute/cpu/cpu_backend.h"
#include "compute/cpu/panels/pack.h"
#include "compute/reference/reference.h"
#include "toy_experts.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;
using toy::reply_of;
using toy::spec_of;

#if defined(__aarch64__)
constexpr NumericsClass kClass = NumericsClass::kBf16Bfdot;
constexpr Isa kIsa = Isa::kNeonBf16;
#else
constexpr NumericsClass kClass = NumericsClass::kBf16Dot;
constexpr Isa kIsa = Isa::kAvx512Bf16;
#endif

bool is_available() { return isa_is_supported(kIsa); }

struct Loaded {
  std::unique_ptr<CpuBackend> backend;
  std::unique_ptr<ExpertLayer> layer;
};

Loaded load(Isa isa, uint32_t threads, const Experts& experts, uint32_t count) {
  Loaded loaded;
  loaded.backend = CpuBackend::create(isa, threads).value();
  loaded.layer =
      loaded.backend->create_layer(experts.spec(), count, WeightFormat::kBF16, kClass).value();
  REQUIRE(experts.load_into(*loaded.layer).ok());
  return loaded;
}

TEST_CASE("bf16 dot products: kernels give the twin's bits over shapes and dtypes of rows") {
  if (!is_available()) return;
  struct Shape {
    uint32_t in, intermediate, out;
  };
  const Shape shapes[] = {
      {1,   1,   1  },
      {7,   5,   3  },
      {64,  33,  65 },
      {255, 96,  130},
      {256, 64,  64 },
      {257, 300, 71 },
      {600, 31,  515},
      {513, 511, 40 }
  };
  uint32_t seed = 1;
  for (const Shape& shape : shapes) {
    for (Dtype row_dtype : {Dtype::kF32, Dtype::kF16, Dtype::kBF16}) {
      const Experts experts(spec_of(shape.in, shape.intermediate, shape.out), 5, Dtype::kBF16,
                            ++seed);
      Batch batch = Batch::random(experts.spec(), 5, 9, 4, ++seed);
      batch.row_dtype = row_dtype;
      batch.reply_dtype = static_cast<Dtype>(seed / 3 % 3);
      CAPTURE(shape.in);
      CHECK(reply_of(*load(kIsa, 1, experts, 5).layer, batch) ==
            reply_of(*load(Isa::kReference, 1, experts, 5).layer, batch));
    }
  }
}

TEST_CASE(
    "bf16 dot products: every number of rows gives the twin's bits, on one expert and spread over "
    "several") {
  if (!is_available()) return;
  const Experts experts(spec_of(300, 70, 100), 3, Dtype::kBF16, 5);
  const Loaded twin = load(Isa::kReference, 1, experts, 3), loaded = load(kIsa, 1, experts, 3);
  for (uint32_t rows :
       {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 23u, 37u, 70u, 97u, 200u}) {
    Batch one = Batch::random(experts.spec(), 1, rows, 1, rows);
    one.row_counts.assign(rows, 1);
    one.ids.assign(rows, 1);
    one.weights.assign(rows, 0.75f);
    CHECK(reply_of(*loaded.layer, one) == reply_of(*twin.layer, one));
    const Batch several = Batch::random(experts.spec(), 3, rows, 6, rows);
    CHECK(reply_of(*loaded.layer, several) == reply_of(*twin.layer, several));
  }
}

TEST_CASE("bf16 dot products: gates, biases and odd widths give the twin's bits") {
  if (!is_available()) return;
  uint32_t seed = 100;
  for (GateKind gate : {GateKind::kNone, GateKind::kGated, GateKind::kClampedSwiglu}) {
    for (Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kReluSquared}) {
      FfnSpec spec = spec_of(41, 51, 61);
      spec.activation = activation;
      spec.gate = gate;
      spec.has_gate_up_bias = ++seed % 2 == 0;
      spec.has_down_bias = seed / 2 % 2 == 0;
      if (gate == GateKind::kClampedSwiglu)
        spec.alpha = 1.702f, spec.up_offset = 1.0f, spec.up_limit = 0.75f;
      const Experts experts(spec, 2, Dtype::kBF16, seed);
      const Batch batch = Batch::random(spec, 2, 14, 3, seed);
      CHECK(reply_of(*load(kIsa, 1, experts, 2).layer, batch) ==
            reply_of(*load(Isa::kReference, 1, experts, 2).layer, batch));
    }
  }
}

TEST_CASE("bf16 dot products: one, two and three threads give the same bits") {
  if (!is_available()) return;
  const Experts experts(spec_of(512, 200, 384), 6, Dtype::kBF16, 9);
  const Loaded one = load(kIsa, 1, experts, 6);
  for (uint32_t threads : {2u, 3u}) {
    const Loaded more = load(kIsa, threads, experts, 6);
    for (uint32_t rows : {1u, 5u, 40u}) {
      const Batch batch = Batch::random(experts.spec(), 6, rows, 4, rows + threads);
      CHECK(reply_of(*more.layer, batch) == reply_of(*one.layer, batch));
    }
  }
}

TEST_CASE("bf16 dot products: a row's bits do not depend on the rows beside it") {
  for (Isa isa : {Isa::kReference, kIsa}) {
    if (!isa_is_supported(isa)) continue;
    const Experts experts(spec_of(320, 90, 128), 2, Dtype::kBF16, 21);
    const Loaded loaded = load(isa, 1, experts, 2);
    const Batch batch = Batch::random(experts.spec(), 2, 30, 4, 22);
    const std::vector<std::byte> together = reply_of(*loaded.layer, batch);
    const size_t row_bytes = 4 * experts.spec().out_size, in_size = experts.spec().in_size;
    for (uint32_t begin = 0, end = 1, pair = 0; begin < batch.num_rows();
         begin = end, end = std::min(2 * end, batch.num_rows())) {
      Batch slice;  // rows [begin, end): slices of 1, 1, 2, 4, ... rows
      slice.rows.assign(batch.rows.begin() + begin * static_cast<long>(in_size),
                        batch.rows.begin() + end * static_cast<long>(in_size));
      for (uint32_t r = begin; r < end; ++r) {
        slice.row_counts.push_back(batch.row_counts[r]);
        for (uint32_t n = 0; n < batch.row_counts[r]; ++n, ++pair) {
          slice.ids.push_back(batch.ids[pair]);
          slice.weights.push_back(batch.weights[pair]);
        }
      }
      const std::vector<std::byte> found = reply_of(*loaded.layer, slice);
      REQUIRE(std::memcmp(found.data(), together.data() + begin * row_bytes, found.size()) == 0);
    }
  }
}

TEST_CASE("bf16 dot products: NaN, infinity and what rounds to infinity stay in their own row") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 31);
  Batch clean = Batch::random(experts.spec(), 3, 20, 0, 32);
  clean.row_counts.assign(20, 2);
  for (uint32_t r = 0; r < 20; ++r) {
    for (uint32_t n = 0; n < 2; ++n)
      clean.ids.push_back(static_cast<uint16_t>((r + n) % 3)), clean.weights.push_back(0.5f);
  }
  Batch dirty = clean;
  dirty.rows[3 * 64 + 5] = std::bit_cast<float>(0xffabcdefu);  // a negative NaN with a payload
  dirty.rows[7 * 64 + 1] = std::numeric_limits<float>::infinity();
  dirty.rows[11 * 64 + 9] = std::numeric_limits<float>::max();  // rounds to infinity
  const Loaded twin = load(Isa::kReference, 1, experts, 3);
  const std::vector<std::byte> expected = reply_of(*twin.layer, dirty),
                               untouched = reply_of(*twin.layer, clean);
  for (uint32_t r = 0; r < 20; ++r) {
    uint32_t bits;
    std::memcpy(&bits, expected.data() + r * 320, 4);
    if (r == 3 || r == 7 || r == 11)
      CHECK(bits == 0x7fc00000u);
    else
      CHECK(std::memcmp(expected.data() + r * 320, untouched.data() + r * 320, 320) == 0);
  }
  if (is_available()) CHECK(reply_of(*load(kIsa, 1, experts, 3).layer, dirty) == expected);
}

TEST_CASE("bf16 dot products: rows, weights and sums among the subnormals give the twin's bits") {
  if (!is_available()) return;
  const Experts experts(spec_of(64, 48, 80), 2, Dtype::kBF16, 41);
  const Loaded twin = load(Isa::kReference, 1, experts, 2), loaded = load(kIsa, 2, experts, 2);
  for (float scale : {1e-36f, 1e-37f, 1e-38f, 1e-19f}) {  // 1e-19: intermediate values near 2^-126
    Batch batch = Batch::random(experts.spec(), 2, 9, 2, 42);
    for (float& value : batch.rows) value *= scale;
    CHECK(reply_of(*loaded.layer, batch) == reply_of(*twin.layer, batch));
  }
}

TEST_CASE(
    "bf16 dot products: only sets with the instruction and the reference compute a class, and only "
    "with bf16 weights") {
  for (const auto& [numerics, owner] : {
           std::pair{NumericsClass::kBf16Dot,   Isa::kAvx512Bf16},
           {NumericsClass::kBf16Bfdot, Isa::kNeonBf16  }
  }) {
    CAPTURE(numerics_name(numerics));
    for (Isa isa : kAllIsas) {
      if (!isa_is_supported(isa)) continue;
      CAPTURE(isa_name(isa));
      const auto backend = CpuBackend::create(isa, 1).value();
      const auto made = backend->create_layer(spec_of(8, 8, 8), 1, WeightFormat::kBF16, numerics);
      CHECK(made.ok() == (isa == Isa::kReference || isa == owner));
      if (!made.ok()) CHECK(made.error().code == ErrorCode::kUnsupported);
      for (WeightFormat format : {WeightFormat::kF32, WeightFormat::kF16, WeightFormat::kQ8_0}) {
        CHECK(!backend->create_layer(spec_of(32, 32, 32), 1, format, numerics).ok());
      }
    }
  }
}

TEST_CASE("bf16 dot products: a layer holds as many bytes as in f32-canonical, odd widths too") {
  if (!is_available()) return;
  for (const FfnSpec& spec : {spec_of(64, 48, 80), spec_of(33, 65, 31)}) {
    const Experts experts(spec, 2, Dtype::kBF16, 51);
    const auto backend = CpuBackend::create(kIsa, 1).value();
    const auto canonical = backend->create_layer(spec, 2, WeightFormat::kBF16).value();
    REQUIRE(experts.load_into(*canonical).ok());
    CHECK(load(kIsa, 1, experts, 2).layer->resident_bytes() == canonical->resident_bytes());
    CHECK(canonical->resident_bytes() ==
          CpuBackend::predicted_bytes(kIsa, spec, 2, WeightFormat::kBF16));
  }
}

// Element (o, i), o * 500 + i + 1, behind one more: sources are aligned to elements only.
std::vector<uint16_t> numbered(uint32_t outputs, uint32_t inputs, int64_t output_stride,
                               int64_t input_stride) {
  std::vector<uint16_t> values(
      static_cast<size_t>((outputs - 1) * output_stride + (inputs - 1) * input_stride) + 2);
  for (uint32_t o = 0; o < outputs; ++o) {
    for (uint32_t i = 0; i < inputs; ++i) {
      values[1 + static_cast<size_t>(o * output_stride + i * input_stride)] =
          static_cast<uint16_t>(o * 500 + i + 1);
    }
  }
  return values;
}

TEST_CASE(
    "bf16 dot products: a panel has every pair of inputs in its word, whatever the layout of the "
    "source") {
  constexpr uint32_t kOutputs = 80, kWidth = 32;
  for (uint32_t inputs : {1u, 2u, 103u, 104u}) {
    for (auto [output_stride, input_stride] : {
             std::pair<int64_t, int64_t>{inputs,         1       },
             {2 * inputs + 2, 1       },
             {2 * inputs + 1, 1       },
             {1,              kOutputs},
             {3,              300     }
    }) {
      const std::vector<uint16_t> values = numbered(kOutputs, inputs, output_stride, input_stride);
      const auto* first = reinterpret_cast<const std::byte*>(values.data() + 1);
      const MatrixView view{first,  WeightFormat::kBF16, kOutputs,
                            inputs, output_stride,       input_stride};
      for (uint32_t panel = 0; panel * kWidth < kOutputs; ++panel) {
        std::vector<uint16_t> packed(size_t{inputs} * kWidth, 7);
        REQUIRE(panel_bytes(WeightFormat::kBF16, inputs, kWidth) == 2 * packed.size());
        pack_bf16_pairs(view, WeightFormat::kBF16, panel, kWidth,
                        reinterpret_cast<std::byte*>(packed.data()));
        size_t wrong = 0;
        for (uint32_t i = 0; i < inputs; ++i) {
          for (uint32_t slot = 0; slot < kWidth; ++slot) {
            const uint32_t output = panel * kWidth + slot;
            const bool is_alone = i + 1 == inputs && inputs % 2 != 0;
            const size_t at = is_alone ? size_t{i} * kWidth + slot
                                       : size_t{i / 2 * 2} * kWidth + 2 * slot + i % 2;
            wrong +=
                packed[at] != (output < kOutputs ? static_cast<uint16_t>(output * 500 + i + 1) : 0);
          }
        }
        CHECK_MESSAGE(wrong == 0, inputs, " inputs, panel ", panel, ", strides ", output_stride,
                      " and ", input_stride);
      }
    }
  }
}

}  // namespace
}  // namespace dflash::compute
