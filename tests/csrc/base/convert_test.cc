// Conversions: exhaustive over the 16-bit types, against long-hand rounding for float32, and equal
// bits on every instruction set.
// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/convert_kernels.h"

namespace dflash {
namespace {

using internal::ConvertKernels;

std::vector<const ConvertKernels*> wide_kernels() {
  std::vector<const ConvertKernels*> kernels;
#if defined(__x86_64__)
  if (internal::has_avx2_f16c()) kernels.push_back(&internal::kConvertAvx2);
  if (internal::has_avx512()) kernels.push_back(&internal::kConvertAvx512);
#elif defined(__aarch64__)
  kernels.push_back(&internal::kConvertNeon);
#endif
  return kernels;
}

// Random patterns plus every neighbourhood where rounding changes its mind.
std::vector<uint32_t> interesting_floats() {
  std::vector<uint32_t> bits;
  std::mt19937 random(7);
  for (int i = 0; i < 200'000; ++i) bits.push_back(static_cast<uint32_t>(random()));
  for (uint32_t half = 0; half < 0x10000; ++half) {
    for (uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
      bits.push_back((half << 16) | low);
  }
  // ties and neighbours between adjacent f16 values
  for (uint32_t half = 0; half < 0x7c00; ++half) {
    const uint32_t value = std::bit_cast<uint32_t>(f16_to_f32(static_cast<uint16_t>(half)));
    const uint32_t next = std::bit_cast<uint32_t>(f16_to_f32(static_cast<uint16_t>(half + 1)));
    const double middle = half + 1 == 0x7c00 ? 65520.0
                                             : (static_cast<double>(std::bit_cast<float>(value)) +
                                                static_cast<double>(std::bit_cast<float>(next))) /
                                                   2;
    const uint32_t tie = std::bit_cast<uint32_t>(static_cast<float>(middle));
    for (uint32_t near : {tie - 1, tie, tie + 1}) {
      bits.push_back(near);
      bits.push_back(near | 0x80000000u);
    }
  }
  return bits;
}

std::byte* bytes_of(void* data) { return static_cast<std::byte*>(data); }

// Nearest f16 by search over all of them, ties to the even pattern: slow and independent of the
// code under test.
uint16_t nearest_f16(double magnitude) {
  uint16_t low = 0, high = 0x7c00;  // values grow with the pattern; infinity stands for 65536
  const auto value = [](uint16_t half) {
    return half == 0x7c00 ? 65536.0 : static_cast<double>(f16_to_f32(half));
  };
  while (high - low > 1) {
    const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
    (value(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - value(low), above = value(high) - magnitude;
  if (below != above) return below < above ? low : high;
  return (low & 1) == 0 ? low : high;
}

TEST_CASE("f16 widens to its defined value") {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const float value = f16_to_f32(static_cast<uint16_t>(half));
    const int exponent = (half >> 10) & 31, mantissa = half & 1023;
    CHECK(std::signbit(value) == ((half & 0x8000) != 0));
    if (exponent == 31) {
      CHECK((mantissa == 0 ? std::isinf(value) : std::isnan(value)));
    } else {
      const double expected =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      CHECK(std::fabs(static_cast<double>(value)) == expected);
    }
  }
}

TEST_CASE("16-bit values survive the way to float32 and back") {
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const uint16_t bits = static_cast<uint16_t>(half);
    const bool f16_nan = (half & 0x7fff) > 0x7c00, bf16_nan = (half & 0x7fff) > 0x7f80;
    CHECK(f32_to_f16(f16_to_f32(bits)) == (f16_nan ? bits | 0x200 : bits));
    CHECK(f32_to_bf16(bf16_to_f32(bits)) == (bf16_nan ? bits | 0x40 : bits));
  }
}

TEST_CASE("narrowing to f16 rounds to nearest even") {
  for (uint32_t bits : interesting_floats()) {
    const float value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    const uint16_t expected = static_cast<uint16_t>(
        ((bits >> 16) & 0x8000) |
        nearest_f16(std::min(65536.0, std::fabs(static_cast<double>(value)))));
    REQUIRE(f32_to_f16(value) == expected);
  }
}

TEST_CASE("narrowing to bf16 rounds to nearest even") {
  for (uint32_t bits : interesting_floats()) {
    const float value = std::bit_cast<float>(bits);
    if (std::isnan(value)) continue;
    const uint32_t low = bits & 0xffff, high = bits >> 16;
    const bool up = low > 0x8000 || (low == 0x8000 && (high & 1) != 0);
    REQUIRE(f32_to_bf16(value) == static_cast<uint16_t>(high + (up ? 1 : 0)));
  }
}

TEST_CASE("every instruction set narrows to the scalar bits and agrees on range") {
  std::vector<uint32_t> values = interesting_floats();
  for (const ConvertKernels* kernels : wide_kernels()) {
    for (auto kernel : {&ConvertKernels::narrow_f16, &ConvertKernels::narrow_bf16}) {
      for (size_t start = 0; start + 37 < values.size(); start += 37) {
        const size_t count = 1 + start % 37;
        uint16_t expected[37] = {}, found[37] = {};
        const bool expected_range =
            (internal::kConvertScalar.*kernel)(bytes_of(&values[start]), bytes_of(expected), count);
        const bool found_range =
            (kernels->*kernel)(bytes_of(&values[start]), bytes_of(found), count);
        REQUIRE(std::memcmp(expected, found, sizeof(found)) == 0);
        REQUIRE(expected_range == found_range);
      }
    }
  }
}

TEST_CASE("every instruction set widens and adds to the scalar bits") {
  std::vector<uint16_t> all(0x10000);
  for (uint32_t half = 0; half < 0x10000; ++half) all[half] = static_cast<uint16_t>(half);
  std::vector<float> start(all.size());
  std::mt19937 random(11);
  for (float& value : start) value = std::bit_cast<float>(static_cast<uint32_t>(random()));
  for (const ConvertKernels* kernels : wide_kernels()) {
    for (size_t count : {size_t{65536}, size_t{65529}, size_t{3}}) {
      for (auto kernel : {&ConvertKernels::widen_f16, &ConvertKernels::widen_bf16,
                          &ConvertKernels::widen_add_f16, &ConvertKernels::widen_add_bf16}) {
        std::vector<float> expected = start, found = start;
        (internal::kConvertScalar.*kernel)(bytes_of(all.data()), expected.data(), count);
        (kernels->*kernel)(bytes_of(all.data()), found.data(), count);
        REQUIRE(std::memcmp(expected.data(), found.data(), 4 * start.size()) == 0);
      }
      std::vector<float> expected = start, found = start;
      internal::kConvertScalar.widen_add_f32(bytes_of(start.data()), expected.data(), count);
      kernels->widen_add_f32(bytes_of(start.data()), found.data(), count);
      REQUIRE(std::memcmp(expected.data(), found.data(), 4 * start.size()) == 0);
    }
  }
}

TEST_CASE("a finite value that becomes infinite is reported wherever it stands") {
  struct Case {
    Dtype to;
    float fits;
    float overflows;
  };
  for (const Case& c : {
           Case{Dtype::kF16,  65519.99f,       65520.0f   },
           Case{Dtype::kBF16, 0x1.fefffep127f, 0x1.ffp127f}
  }) {
    for (size_t place = 0; place < 50; ++place) {
      std::vector<float> values(50, 1.0f);
      std::vector<uint16_t> narrowed(50);
      // already infinite: not an overflow
      values[(place + 1) % 50] = std::numeric_limits<float>::infinity();
      values[(place + 2) % 50] = std::numeric_limits<float>::quiet_NaN();
      values[place] = -c.fits;
      CHECK(convert(Dtype::kF32, bytes_of(values.data()), c.to, bytes_of(narrowed.data()), 50));
      values[place] = -c.overflows;
      CHECK_FALSE(
          convert(Dtype::kF32, bytes_of(values.data()), c.to, bytes_of(narrowed.data()), 50));
    }
  }
}

TEST_CASE("conversion works at any alignment and between the 16-bit types") {
  const size_t count = 1003;
  std::vector<std::byte> source(2 * count + 1), destination(4 * count + 3);
  std::vector<uint16_t> bf16(count);
  for (size_t i = 0; i < count; ++i) bf16[i] = f32_to_bf16(static_cast<float>(i) * 0.25f - 100.0f);
  std::memcpy(source.data() + 1, bf16.data(), 2 * count);
  CHECK(convert(Dtype::kBF16, source.data() + 1, Dtype::kF32, destination.data() + 3, count));
  for (size_t i = 0; i < count; ++i) {
    float value;
    std::memcpy(&value, destination.data() + 3 + 4 * i, 4);
    REQUIRE(value == bf16_to_f32(bf16[i]));
  }
  CHECK(convert(Dtype::kBF16, source.data() + 1, Dtype::kF16, destination.data() + 1, count));
  for (size_t i = 0; i < count; ++i) {
    uint16_t value;
    std::memcpy(&value, destination.data() + 1 + 2 * i, 2);
    REQUIRE(value == f32_to_f16(bf16_to_f32(bf16[i])));
  }
}

}  // namespace
}  // namespace dflash
