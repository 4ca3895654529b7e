// The scalar twin of VDPBF16PS has the processor's bits wherever products and sums lie, and the class is within a derived bound of float64.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <bit>
#include <cmath>
#include <random>

#include "base/dtype.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/reference/bf16_dot.h"
#include "compute/reference/reference.h"
#include "toy_experts.h"

namespace dflash::compute {
namespace {

using toy::Batch;
using toy::Experts;

struct Lane {
  uint16_t a[2], b[2];
  uint32_t sum;
};

uint32_t twin_bits(const Lane& lane) {
  const float a[2] = {bf16_to_f32(lane.a[0]), bf16_to_f32(lane.a[1])}, b[2] = {bf16_to_f32(lane.b[0]), bf16_to_f32(lane.b[1])};
  return std::bit_cast<uint32_t>(bf16_pair_dot(a, b, std::bit_cast<float>(lane.sum)));
}

TEST_CASE("the twin of VDPBF16PS takes the upper pair first and flushes what lies below 2^-126 after rounding to 24 bits") {
  constexpr uint16_t kOne = 0x3f80, kTiny = 0x1f80, kMinusTiny = 0x9f80;  // 1 and +-2^-64
  const auto with = [](uint16_t a0, uint16_t b0, uint32_t sum) { return twin_bits(Lane{{a0, 0}, {b0, 0}, sum}); };
  const auto power = [](int exponent) { return static_cast<uint16_t>((exponent + 127) << 7); };
  CHECK(with(kMinusTiny, power(-87), 0x00800000u) == 0x00800000u);             // 2^-126 - 2^-151: the tie goes up
  CHECK(with(kMinusTiny, power(-86), 0x00800000u) == 0u);                      // 2^-126 - 2^-150: below
  CHECK(with(kTiny, power(-86), 0x80800000u) == 0x80000000u);                  // the same below zero
  CHECK(with(kMinusTiny, power(-88), 0x00800000u) == 0x00800000u);             // nearer than the tie
  CHECK(with(kOne, 0x0001, 0x3f800000u) == 0x3f800000u);                       // a subnormal factor is zero
  CHECK(with(kOne, kOne, 0x007fffffu) == 0x3f800000u);                         // a subnormal sum is zero
  CHECK(twin_bits(Lane{{kOne, kOne}, {0xcb80, 0x4b80}, 0x3f800000u}) == 0u);   // 1 + 2^24 is a tie, to 2^24, and then - 2^24
}

#if defined(__x86_64__)

bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// `bits` of every lane from the instruction.
__attribute__((target("avx512f,avx512bf16"))) void dot_lanes(const Lane* lanes, uint32_t* bits) {
  alignas(64) uint32_t a[16], b[16], sums[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = lanes[i].a[0] | uint32_t{lanes[i].a[1]} << 16;
    b[i] = lanes[i].b[0] | uint32_t{lanes[i].b[1]} << 16;
    sums[i] = lanes[i].sum;
  }
  const __m512 found = _mm512_dpbf16_ps(_mm512_load_ps(sums), reinterpret_cast<__m512bh>(_mm512_load_si512(a)),
                                        reinterpret_cast<__m512bh>(_mm512_load_si512(b)));
  _mm512_storeu_ps(bits, found);
}

// Exponents of the factors' and the sum's magnitudes: [first, first + count).
struct Range {
  const char* name;
  uint32_t factor_first, factor_count, sum_first, sum_count;
};

Lane random_lane(std::mt19937_64& random, const Range& range) {
  const auto factor = [&] {
    const uint64_t draw = random();
    const uint32_t mantissa = draw >> 60 < 4 ? 0 : draw & 0x7f;  // a quarter are powers of two: sums meet exactly
    return static_cast<uint16_t>((draw >> 8 & 1) << 15 | (range.factor_first + (draw >> 16) % range.factor_count) << 7 | mantissa);
  };
  Lane lane{{factor(), factor()}, {factor(), factor()}, 0};
  const uint64_t draw = random();
  const uint32_t mantissa = draw >> 60 < 8 ? 0 : static_cast<uint32_t>(draw) & 0x7fffff;
  lane.sum = static_cast<uint32_t>((draw >> 32 & 1) << 31 | (range.sum_first + (draw >> 33) % range.sum_count) << 23 | mantissa);
  return lane;
}

TEST_CASE("the twin of VDPBF16PS has the instruction's bits, whatever the control word") {
  if (!isa_is_supported(Isa::kAvx512Bf16)) return;
  const Range ranges[] = {{"like values of a layer", 120, 12, 114, 20},
                          {"far apart", 100, 50, 80, 80},
                          {"products around 2^-126", 54, 20, 0, 4},
                          {"products of subnormals", 0, 130, 0, 10},
                          {"overflowing", 180, 20, 230, 26},
                          {"any bits", 0, 256, 0, 256}};
  std::mt19937_64 random(7);
  const unsigned control = _mm_getcsr();
  for (const Range& range : ranges) {
    size_t wrong = 0;
    for (unsigned word : {0x1f80u, 0x9fc0u, 0x3f80u}) {  // as usual; flushing; rounding down
      for (int round = 0; round < 6000; ++round) {
        Lane lanes[16];
        uint32_t found[16];
        for (Lane& lane : lanes) lane = random_lane(random, range);
        _mm_setcsr(word);
        dot_lanes(lanes, found);
        _mm_setcsr(control);
        for (int i = 0; i < 16; ++i) {
          const uint32_t expected = twin_bits(lanes[i]);
          wrong += expected != found[i] && !(is_nan(expected) && is_nan(found[i]));
        }
      }
    }
    CHECK_MESSAGE(wrong == 0, range.name);
  }
}

#endif

// |W| |x|.
std::vector<double> absolute_product(const MatrixView& matrix, const std::vector<double>& input) {
  std::vector<double> output(matrix.outputs, 0.0);
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    for (uint32_t i = 0; i < matrix.inputs; ++i) {
      uint16_t bits;
      std::memcpy(&bits, matrix.data + 2 * (size_t{o} * matrix.inputs + i), 2);
      output[o] += std::fabs(static_cast<double>(bf16_to_f32(bits))) * std::fabs(input[i]);
    }
  }
  return output;
}

// How far one expert's outputs of bf16-dot can lie from the exact ones. A bf16 is within r = 2^-9 of its value, and a product of n inputs
// within n u = n 2^-24 of the sum of magnitudes (Higham, section 3.1; one more u per block). With |silu'| <= 1.1 and |silu(x)| <= |x|,
// h = silu(g) * u moves by at most 1.1 dg (|u| + du) + |g| du.
std::vector<double> error_bound(const ExpertWeights& weights, const std::vector<double>& row) {
  constexpr double kRounding = 0x1p-9, kStep = 0x1p-24;
  const auto of_sum = [](size_t count) { return kRounding + static_cast<double>(count + count / 256 + 2) * kStep * (1 + kRounding); };
  const std::vector<double> g = absolute_product(weights.gate, row), u = absolute_product(weights.up, row);
  std::vector<double> magnitude(g.size()), error(g.size());
  for (size_t i = 0; i < g.size(); ++i) {
    const double dg = of_sum(row.size()) * g[i], du = of_sum(row.size()) * u[i];
    magnitude[i] = g[i] * u[i];
    error[i] = (1.1 * dg * (u[i] + du) + g[i] * du + 16 * kStep * magnitude[i]) * (1 + kRounding);  // 16 steps: the activation's own
  }
  const std::vector<double> moved = absolute_product(weights.down, error), sums = absolute_product(weights.down, magnitude);
  std::vector<double> bound(sums.size());
  for (size_t o = 0; o < bound.size(); ++o) bound[o] = moved[o] + of_sum(error.size()) * (sums[o] + moved[o]);
  return bound;
}

TEST_CASE("bf16-dot is within the derived bound of float64, and as near as rounding to bf16 allows") {
  FfnSpec spec;
  spec.in_size = 512, spec.intermediate_size = 256, spec.out_size = 200;
  const Experts experts(spec, 1, Dtype::kBF16, 61);
  Batch batch = Batch::random(spec, 1, 24, 0, 62);
  batch.row_counts.assign(24, 1);
  batch.ids.assign(24, 0);
  batch.weights.assign(24, 1.0f);
  const auto backend = CpuBackend::create(isa_is_supported(Isa::kAvx512Bf16) ? Isa::kAvx512Bf16 : Isa::kReference, 1).value();
  const auto layer = backend->create_layer(spec, 1, WeightFormat::kBF16, NumericsClass::kBf16Dot).value();
  REQUIRE(experts.load_into(*layer).ok());
  std::vector<std::byte> reply;
  REQUIRE(batch.run(*layer, reply).ok());
  const std::vector<std::byte> encoded = toy::encode(batch.row_dtype, batch.rows);
  std::vector<std::byte> unused(reply.size());
  const std::vector<double> exact = forward_float64(spec, experts.all_weights(), batch.args(encoded, unused));
  double power = 0, error_power = 0;
  for (uint32_t r = 0; r < 24; ++r) {
    const std::vector<double> row(batch.rows.begin() + r * 512, batch.rows.begin() + (r + 1) * 512);
    const std::vector<double> bound = error_bound(experts.weights(0), row);
    for (uint32_t o = 0; o < 200; ++o) {
      float found;
      std::memcpy(&found, reply.data() + 4 * (r * 200 + o), 4);
      const double error = static_cast<double>(found) - exact[r * 200 + o];
      REQUIRE(std::fabs(error) <= bound[o]);
      power += exact[r * 200 + o] * exact[r * 200 + o];
      error_power += error * error;
    }
  }
  // Three roundings of at most 2^-9 (row into g and u, h) add up as random ones do: sqrt(3) * 2^-9 / sqrt(3) of the deviation.
  const double relative = std::sqrt(error_power / power);
  CHECK(relative <= 0x1p-8);
  CHECK(relative >= 0x1p-12);  // rows and intermediate rows really are rounded to bf16
}

}  // namespace
}  // namespace dflash::compute
