// The scalar twin of VDPBF16PS has the processor's bits wherever products and sums lie.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "compute/cpu/cpu_backend.h"
#include "compute/reference/bf16_dot.h"
#include "dot_lanes.h"

namespace dflash::compute {
namespace {

using lanes::kRanges;
using lanes::Lane;
using lanes::random_lane;
using lanes::Range;
using lanes::same_bits;

uint32_t twin_bits(const Lane& lane) { return lanes::bits_of(bf16_pair_dot, lane); }

TEST_CASE(
    "the twin of VDPBF16PS takes the upper pair first and flushes what lies below 2^-126 after "
    "rounding to 24 bits") {
  constexpr uint16_t kOne = 0x3f80, kTiny = 0x1f80, kMinusTiny = 0x9f80;  // 1 and +-2^-64
  const auto with = [](uint16_t a0, uint16_t b0, uint32_t sum) {
    return twin_bits(Lane{
        {a0, 0},
        {b0, 0},
        sum
    });
  };
  const auto power = [](int exponent) { return static_cast<uint16_t>((exponent + 127) << 7); };
  // 2^-126 - 2^-151: the tie goes up
  CHECK(with(kMinusTiny, power(-87), 0x00800000u) == 0x00800000u);
  // 2^-126 - 2^-150: below
  CHECK(with(kMinusTiny, power(-86), 0x00800000u) == 0u);
  // the same below zero
  CHECK(with(kTiny, power(-86), 0x80800000u) == 0x80000000u);
  // nearer than the tie
  CHECK(with(kMinusTiny, power(-88), 0x00800000u) == 0x00800000u);
  // a subnormal factor is zero
  CHECK(with(kOne, 0x0001, 0x3f800000u) == 0x3f800000u);
  // a subnormal sum is zero
  CHECK(with(kOne, kOne, 0x007fffffu) == 0x3f800000u);
  // 1 + 2^24 is a tie, to 2^24, and then - 2^24
  CHECK(twin_bits(Lane{
            {kOne,   kOne  },
            {0xcb80, 0x4b80},
            0x3f800000u
  }) == 0u);
}

#if defined(__x86_64__)

// `bits` of every lane from the instruction.
__attribute__((target("avx512f,avx512bf16"))) void dot_lanes(const Lane* lanes, uint32_t* bits) {
  alignas(64) uint32_t a[16], b[16], sums[16];
  for (int i = 0; i < 16; ++i) {
    a[i] = lanes[i].a[0] | uint32_t{lanes[i].a[1]} << 16;
    b[i] = lanes[i].b[0] | uint32_t{lanes[i].b[1]} << 16;
    sums[i] = lanes[i].sum;
  }
  const __m512 found =
      _mm512_dpbf16_ps(_mm512_load_ps(sums), reinterpret_cast<__m512bh>(_mm512_load_si512(a)),
                       reinterpret_cast<__m512bh>(_mm512_load_si512(b)));
  _mm512_storeu_ps(bits, found);
}

TEST_CASE("the twin of VDPBF16PS has the instruction's bits, whatever the control word") {
  if (!isa_is_supported(Isa::kAvx512Bf16)) return;
  std::mt19937_64 random(7);
  const unsigned control = _mm_getcsr();
  for (const Range& range : kRanges) {
    size_t wrong = 0;
    for (unsigned word : {0x1f80u, 0x9fc0u, 0x3f80u}) {  // as usual; flushing; rounding down
      for (int round = 0; round < 6000; ++round) {
        Lane drawn[16];
        uint32_t found[16];
        for (Lane& lane : drawn) lane = random_lane(random, range);
        _mm_setcsr(word);
        dot_lanes(drawn, found);
        _mm_setcsr(control);
        for (int i = 0; i < 16; ++i) {
          wrong += !same_bits(twin_bits(drawn[i]), found[i]);
        }
      }
    }
    CHECK_MESSAGE(wrong == 0, range.name);
  }
}

#endif

}  // namespace
}  // namespace dflash::compute
