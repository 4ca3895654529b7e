// Packing of float weights: every element is where the panel's description (pack.h) puts it,
// whatever the layout of the source.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "compute/cpu/panels/pack.h"

namespace dflash::compute {
namespace {

// a partial panel, and inputs left over after whole tiles
constexpr uint32_t kOutputs = 80, kInputs = 103;

// Element (o, i) holds o * 1000 + i (mod 2^16 for 16-bit elements), wherever the strides put it.
template <class T>
std::vector<T> source(int64_t output_stride, int64_t input_stride) {
  std::vector<T> values(
      static_cast<size_t>((kOutputs - 1) * output_stride + (kInputs - 1) * input_stride) + 1);
  for (uint32_t o = 0; o < kOutputs; ++o) {
    for (uint32_t i = 0; i < kInputs; ++i)
      values[static_cast<size_t>(o * output_stride + i * input_stride)] =
          static_cast<T>(o * 1000 + i);
  }
  return values;
}

template <class T>
void check_panels(WeightFormat format, uint32_t width, int64_t output_stride,
                  int64_t input_stride) {
  const std::vector<T> values = source<T>(output_stride, input_stride);
  const MatrixView view{reinterpret_cast<const std::byte*>(values.data()),
                        format,
                        kOutputs,
                        kInputs,
                        output_stride,
                        input_stride};
  for (uint32_t panel = 0; panel * width < kOutputs; ++panel) {
    std::vector<T> packed(size_t{kInputs} * width, T{7});
    REQUIRE(panel_bytes(format, kInputs, width) == packed.size() * sizeof(T));
    pack_panel(view, format, panel, width, reinterpret_cast<std::byte*>(packed.data()));
    size_t wrong = 0;
    for (uint32_t i = 0; i < kInputs; ++i) {
      for (uint32_t slot = 0; slot < width; ++slot) {
        const uint32_t within = format != WeightFormat::kBF16 ? slot
                                : slot % 2 == 0               ? slot / 2
                                                              : width / 2 + slot / 2;
        const uint32_t output = panel * width + within;
        const T expected = output < kOutputs ? static_cast<T>(output * 1000 + i) : T{0};
        wrong += packed[size_t{i} * width + slot] != expected;
      }
    }
    CHECK_MESSAGE(wrong == 0, format_name(format), ", width ", width, ", panel ", panel,
                  ", strides ", output_stride, " and ", input_stride);
  }
}

TEST_CASE("a panel has every output of every input in its place") {
  for (uint32_t width : {8u, 16u, 32u, 48u}) {
    for (auto [output_stride, input_stride] : {
             std::pair<int64_t, int64_t>{kInputs,         1       },
             {2 * kInputs + 1, 1       },
             {1,               kOutputs},
             {3,               300     }
    }) {
      check_panels<uint32_t>(WeightFormat::kF32, width, output_stride, input_stride);
      check_panels<uint16_t>(WeightFormat::kF16, width, output_stride, input_stride);
      check_panels<uint16_t>(WeightFormat::kBF16, width, output_stride, input_stride);
    }
  }
}

}  // namespace
}  // namespace dflash::compute
