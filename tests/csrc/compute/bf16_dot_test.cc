// bf16-dot and bf16-bfdot, whichever this kind of processor has: kernels give the twin's bits over
// shapes, rows, threads and specials.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <limits>

#include "compute/cpu/panels/pack.h"
#include "twins.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;
using toy::spec_of;
using toy::Twins;

#if defined(__aarch64__)
constexpr NumericsClass kClass = NumericsClass::kBf16Bfdot;
constexpr Isa kIsa = Isa::kNeonBf16;
#else
constexpr NumericsClass kClass = NumericsClass::kBf16Dot;
constexpr Isa kIsa = Isa::kAvx512Bf16;
#endif

// None on a processor without the instruction.
const toy::Machines kMachines = toy::kernel_sets_of(kClass);

TEST_CASE("bf16 dot products: kernels give the twin's bits over shapes and dtypes of rows") {
  const std::vector<toy::Shape> shapes = {
      {1,   1,   1  },
      {7,   5,   3  },
      {64,  33,  65 },
      {255, 96,  130},
      {256, 64,  64 },
      {257, 300, 71 },
      {600, 31,  515},
      {513, 511, 40 }
  };
  check_shapes(kMachines, shapes, {WeightFormat::kBF16});
}

TEST_CASE(
    "bf16 dot products: every number of rows gives the twin's bits, on one expert and spread over "
    "several") {
  const Experts experts(spec_of(300, 70, 100), 3, Dtype::kBF16, 5);
  check_numbers_of_rows(
      kMachines, experts, Dtype::kBF16,
      {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16, 23, 31, 32, 33, 37, 70, 97, 200});
}

TEST_CASE("bf16 dot products: gates, biases and odd widths give the twin's bits") {
  check_gates(kMachines, {Activation::kSilu, Activation::kGelu, Activation::kReluSquared},
              Dtype::kBF16, Dtype::kBF16);
}

TEST_CASE("bf16 dot products: one, two and three threads give the same bits") {
  const Experts experts(spec_of(512, 200, 384), 6, Dtype::kBF16, 9);
  check_numbers_of_rows(toy::kernel_sets_of(kClass, {1, 2, 3}), experts, Dtype::kBF16, {1, 5, 40});
}

TEST_CASE("bf16 dot products: a row's bits do not depend on the rows beside it") {
  const Experts experts(spec_of(320, 90, 128), 2, Dtype::kBF16, 21);
  Twins(kMachines, experts, Dtype::kBF16).check_slices(Batch::random(experts.spec(), 2, 30, 4, 22));
}

TEST_CASE("bf16 dot products: NaN, infinity and what rounds to infinity stay in their own row") {
  const Experts experts(spec_of(64, 48, 80), 3, Dtype::kBF16, 31);
  std::vector<float> specials = toy::special_values();
  specials[2] = std::numeric_limits<float>::max();  // rounds to infinity
  check_special_rows(kMachines, experts, Dtype::kBF16, specials);
}

TEST_CASE("bf16 dot products: rows, weights and sums among the subnormals give the twin's bits") {
  const Experts experts(spec_of(64, 48, 80), 2, Dtype::kBF16, 41);
  const Twins twins(toy::kernel_sets_of(kClass, {2}), experts, Dtype::kBF16);
  for (float scale : {1e-36f, 1e-37f, 1e-38f, 1e-19f}) {  // 1e-19: intermediate values near 2^-126
    Batch batch = Batch::random(experts.spec(), 2, 9, 2, 42);
    for (float& value : batch.rows) value *= scale;
    twins.check(batch);
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
  if (!isa_is_supported(kIsa)) return;
  for (const FfnSpec& spec : {spec_of(64, 48, 80), spec_of(33, 65, 31)}) {
    const Experts experts(spec, 2, Dtype::kBF16, 51);
    for (NumericsClass numerics : {kClass, kDefaultNumerics}) {
      const auto layer = toy::load(kIsa, experts, Dtype::kBF16, numerics);
      CHECK(layer->resident_bytes() ==
            CpuBackend::predicted_bytes(kIsa, spec, 2, WeightFormat::kBF16));
    }
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
