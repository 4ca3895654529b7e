// The scalar twin of AArch64's BFDOT and BFMMLA has the instructions' bits wherever products and
// sums lie.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#if defined(__aarch64__)
#include <arm_neon.h>
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

uint32_t twin_bits(const Lane& lane) { return lanes::bits_of(bf16_bfdot_step, lane); }

TEST_CASE(
    "the twin of BFDOT rounds the pair and the sum to odd and flushes what lies below 2^-126") {
  constexpr uint16_t kOne = 0x3f80, kOdd = 0x3f81;  // 1 and 1 + 2^-7
  constexpr uint32_t kOneSum = 0x3f800000u;
  const auto power = [](int exponent) { return static_cast<uint16_t>((exponent + 127) << 7); };
  const auto minus = [](uint16_t bits) { return static_cast<uint16_t>(bits | 0x8000); };
  // 1 + 2^-24: inexact, to odd
  CHECK(twin_bits(Lane{
            {kOne,       0},
            {power(-24), 0},
            kOneSum
  }) == 0x3f800001u);
  // however little it is
  CHECK(twin_bits(Lane{
            {kOne,        0},
            {power(-100), 0},
            kOneSum
  }) == 0x3f800001u);
  // odd as it is cut off
  CHECK(twin_bits(Lane{
            {kOne,               0},
            {minus(power(-100)), 0},
            kOneSum
  }) == 0x3f7fffffu);
  // the pair first: (1 + 2^-23) - 1
  CHECK(twin_bits(Lane{
            {kOne, kOne      },
            {kOne, power(-24)},
            0xbf800000u
  }) == 0x34000000u);
  // -0 + (x - x), which is +0
  CHECK(twin_bits(Lane{
            {kOdd, kOdd       },
            {kOdd, minus(kOdd)},
            0x80000000u
  }) == 0u);
  // 2^-127: flushed, then -0 + 0
  CHECK(twin_bits(Lane{
            {power(-64), 0},
            {power(-63), 0},
            0x80000000u
  }) == 0u);
  // a product of 2^-151 is zero by itself
  CHECK(twin_bits(Lane{
            {power(-64),        0},
            {minus(power(-87)), 0},
            0x00800000u
  }) == 0x00800000u);
  // 1.5 * 2^-126 - 2^-126: below, flushed
  CHECK(twin_bits(Lane{
            {power(-63), 0},
            {0x2040,     0},
            0x80800000u
  }) == 0u);
  // to a zero of its sign
  CHECK(twin_bits(Lane{
            {power(-63), 0},
            {0xa040,     0},
            0x00800000u
  }) == 0x80000000u);
  // a subnormal factor is zero
  CHECK(twin_bits(Lane{
            {kOne,   0},
            {0x0001, 0},
            kOneSum
  }) == kOneSum);
  // a subnormal sum is zero
  CHECK(twin_bits(Lane{
            {kOne, 0},
            {kOne, 0},
            0x007fffffu
  }) == kOneSum);
  // 2^128 - 2^103 is inexact: the largest float, which is odd
  CHECK(twin_bits(Lane{
            {kOne,       0},
            {power(103), 0},
            0x7f7fffffu
  }) == 0x7f7fffffu);
  CHECK(twin_bits(Lane{
            {power(64), 0},
            {power(64), 0},
            0u
  }) == 0x7f800000u);  // 2^128
}

#if defined(__aarch64__)

uint64_t control_word() {
  uint64_t word;
  asm volatile("mrs %0, fpcr" : "=r"(word));
  return word;
}

constexpr uint64_t kFlushing = uint64_t{1} << 24, kRoundingDown = uint64_t{2} << 22;

// `bits` of four lanes from the instruction.
__attribute__((target("arch=armv8.2-a+bf16"))) void dot_lanes(const Lane* drawn, uint32_t* bits,
                                                              uint64_t word) {
  uint32_t a[4], b[4], sums[4];
  for (int i = 0; i < 4; ++i) {
    a[i] = drawn[i].a[0] | uint32_t{drawn[i].a[1]} << 16;
    b[i] = drawn[i].b[0] | uint32_t{drawn[i].b[1]} << 16;
    sums[i] = drawn[i].sum;
  }
  const bfloat16x8_t first = vreinterpretq_bf16_u32(vld1q_u32(a)),
                     second = vreinterpretq_bf16_u32(vld1q_u32(b));
  float32x4_t found = vreinterpretq_f32_u32(vld1q_u32(sums));
  const uint64_t before = control_word();
  // `found` holds the instruction between the two
  asm volatile("msr fpcr, %1" : "+w"(found) : "r"(word));
  found = vbfdotq_f32(found, first, second);
  asm volatile("msr fpcr, %1" : "+w"(found) : "r"(before));
  vst1q_u32(bits, vreinterpretq_u32_f32(found));
}

TEST_CASE("the twin of BFDOT has the instruction's bits, whatever the control word") {
  if (!isa_is_supported(Isa::kNeonBf16)) return;
  std::mt19937_64 random(7);
  for (const Range& range : kRanges) {
    size_t wrong = 0;
    for (uint64_t word : {uint64_t{0}, kFlushing, kRoundingDown}) {
      for (int round = 0; round < 6000; ++round) {
        Lane drawn[4];
        uint32_t found[4];
        for (Lane& lane : drawn) lane = random_lane(random, range);
        dot_lanes(drawn, found, word);
        for (int i = 0; i < 4; ++i) wrong += !same_bits(twin_bits(drawn[i]), found[i]);
      }
    }
    CHECK_MESSAGE(wrong == 0, range.name);
  }
}

// A product of 2 x 4 inputs with 2 x 4 weights: rows and outputs are the first factors and the
// second ones of two lanes each.
__attribute__((target("arch=armv8.2-a+bf16"))) void multiply_matrices(const uint32_t* rows,
                                                                      const uint32_t* outputs,
                                                                      uint32_t* sums) {
  const float32x4_t found =
      vbfmmlaq_f32(vreinterpretq_f32_u32(vld1q_u32(sums)), vreinterpretq_bf16_u32(vld1q_u32(rows)),
                   vreinterpretq_bf16_u32(vld1q_u32(outputs)));
  vst1q_u32(sums, vreinterpretq_u32_f32(found));
}

TEST_CASE("BFMMLA is two of the twin's steps per row and output, pairs ascending") {
  if (!isa_is_supported(Isa::kNeonBf16)) return;
  std::mt19937_64 random(8);
  for (const Range& range : kRanges) {
    size_t wrong = 0;
    for (int round = 0; round < 3000; ++round) {
      uint32_t rows[4], outputs[4], sums[4], expected[4];  // [row or output][pair]; [row][output]
      for (int i = 0; i < 4; ++i) {
        const Lane lane = random_lane(random, range);
        rows[i] = lane.a[0] | uint32_t{lane.a[1]} << 16;
        outputs[i] = lane.b[0] | uint32_t{lane.b[1]} << 16;
        sums[i] = lane.sum;
      }
      for (int i = 0; i < 4; ++i) {
        expected[i] = sums[i];
        for (int pair = 0; pair < 2; ++pair) {
          const uint32_t a = rows[i / 2 * 2 + pair], b = outputs[i % 2 * 2 + pair];
          expected[i] = twin_bits(Lane{
              {static_cast<uint16_t>(a), static_cast<uint16_t>(a >> 16)},
              {static_cast<uint16_t>(b), static_cast<uint16_t>(b >> 16)},
              expected[i]
          });
        }
      }
      multiply_matrices(rows, outputs, sums);
      for (int i = 0; i < 4; ++i) wrong += !same_bits(expected[i], sums[i]);
    }
    CHECK_MESSAGE(wrong == 0, range.name);
  }
}

#endif

}  // namespace
}  // namespace dflash::compute
