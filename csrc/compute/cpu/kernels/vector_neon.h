// The vector type of activation.h and canonical_products.h in the 128 bits of AArch64's baseline.
// Included by the kernel files for NEON only. NEON's own minimum and maximum order NaN and the
// zeros otherwise than the class does, so that both are a comparison and a selection here.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace dflash::compute {

struct NeonVector {
  using F = float32x4_t;
  using I = int32x4_t;
  static constexpr int kLanes = 4;
  // Of 32 registers, the rest hold weights and broadcast inputs.
  static constexpr int kAccumulators = 24;
  static constexpr int kMaxTileRows = 12;

  static F set1(float value) { return vdupq_n_f32(value); }
  static F load(const float* from) { return vld1q_f32(from); }
  static void store(float* to, F value) { vst1q_f32(to, value); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F sub(F a, F b) { return vsubq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F sqrt(F a) { return vsqrtq_f32(a); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  static F min(F a, F b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static F select_greater(F a, F b, F x, F y) { return vbslq_f32(vcgtq_f32(a, b), x, y); }
  static I bits(F value) { return vreinterpretq_s32_f32(value); }
  static F from_bits(I bits) { return vreinterpretq_f32_s32(bits); }
  static I set1i(int32_t value) { return vdupq_n_s32(value); }
  static I subi(I a, I b) { return vsubq_s32(a, b); }
  static I halve(I value) { return vshrq_n_s32(value, 1); }
  static F power_of_two(I n) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
  }
  static F canonical_nan(F value) {
    const F nan = vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000u));
    return vbslq_f32(vceqq_f32(value, value), value, nan);
  }

  struct F16 {
    uint16_t bits;
  };
  struct BF16 {
    uint16_t bits;
  };
  static void load_weights(const float* from, F* pair) {
    pair[0] = vld1q_f32(from);
    pair[1] = vld1q_f32(from + 4);
  }
  static void load_weights(const F16* from, F* pair) { widen_f16(vld1q_u16(&from->bits), pair); }
  // Elements alternate between the two vectors (pack.h), so that a shift and a mask widen them.
  static void load_weights(const BF16* from, F* pair) {
    const uint32x4_t both = vreinterpretq_u32_u16(vld1q_u16(&from->bits));
    pair[0] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
    pair[1] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
  }

  // Loads adjacent elements that are stored one after another; no address need be aligned.
  static F load_adjacent(const float* from) { return vld1q_f32(from); }
  static F load_adjacent(const F16* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits)));
  }
  static F load_adjacent(const BF16* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(&from->bits), 16));
  }

  // What follows reads quantised weights (quantized_formats.h), whose addresses are not aligned.
  //
  // The entries of all tables have eight significant bits at most, so that their upper halves are
  // the values: a table takes two registers instead of four.
  using Table = uint8x16x2_t;
  static Table table(const float* values) {
    return {
        {upper_halves(vld1q_f32(values), vld1q_f32(values + 4)),
         upper_halves(vld1q_f32(values + 8), vld1q_f32(values + 12))}
    };
  }
  // Looks up by the low four bits: bytes 2 * index and 2 * index + 1 go to the upper half of the
  // lane. Its lower half indexes beyond the table, which reads as zero.
  static F look_up(const Table& table, I index) {
    const uint32x4_t low = vandq_u32(vreinterpretq_u32_s32(index), vdupq_n_u32(15));
    const uint32x4_t places = vmlaq_u32(vdupq_n_u32(0x0100ffffu), low, vdupq_n_u32(0x02020000u));
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_u32(places)));
  }
  // The same by the low three bits, in a table whose halves are equal.
  static F look_up_eight(const Table& table, I index) { return look_up(table, index); }
  static I load_words(const uint8_t* from) { return vreinterpretq_s32_u8(vld1q_u8(from)); }
  // These are operators, because the intrinsics with a count in a register only shift left.
  static I shift_right(I value, uint32_t count) {
    return vreinterpretq_s32_u32(vreinterpretq_u32_s32(value) >> count);
  }
  static I shift_left(I value, uint32_t count) {
    return vreinterpretq_s32_u32(vreinterpretq_u32_s32(value) << count);
  }
  static I shift_right_signed(I value, int32_t count) { return value >> count; }
  static I merge(I mask, I a, I b) { return vbslq_s32(vreinterpretq_u32_s32(mask), a, b); }
  // A float in [1, 2) with those bits of `mantissa` that the mask has.
  static F one_and(I mantissa, I mask) {
    return vreinterpretq_f32_s32(vorrq_s32(vandq_s32(mantissa, mask), vdupq_n_s32(0x3f800000)));
  }
  static F to_float(I value) { return vcvtq_f32_s32(value); }
  static F load_f16(const uint8_t* from) {
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
  }
  static I widen_u8(const uint8_t* from) {
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(load_four(from)))));
  }
  static I widen_u16(const uint8_t* from) {
    return vreinterpretq_s32_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(from))));
  }
  static F load_u8(const uint8_t* from) { return to_float(widen_u8(from)); }
  static I addi(I a, I b) { return vaddq_s32(a, b); }
  // NEON has no gather; four loads of lanes are what there is.
  static I gather(const uint32_t* table, I index) {
    uint32x4_t found = vdupq_n_u32(table[vgetq_lane_s32(index, 0)]);
    found = vld1q_lane_u32(table + vgetq_lane_s32(index, 1), found, 1);
    found = vld1q_lane_u32(table + vgetq_lane_s32(index, 2), found, 2);
    found = vld1q_lane_u32(table + vgetq_lane_s32(index, 3), found, 3);
    return vreinterpretq_s32_u32(found);
  }
  static F load_i8(const uint8_t* from) {
    return to_float(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(load_four(from))))));
  }
  // 2^(byte - 127) for bytes below 255; byte 0 gives the subnormal 2^-127.
  static F load_exponents(const uint8_t* from) {
    const uint32x4_t exponents = vreinterpretq_u32_s32(widen_u8(from));
    const uint32x4_t is_subnormal = vceqq_u32(exponents, vdupq_n_u32(0));
    return vreinterpretq_f32_u32(
        vbslq_u32(is_subnormal, vdupq_n_u32(0x00400000u), vshlq_n_u32(exponents, 23)));
  }
  // An e4m3 moved to where f16 has sign, exponent and mantissa is the value divided by 2^8, which
  // holds for subnormals too.
  static void load_e4m3(const uint8_t* from, F* pair) {
    const uint16x8_t wide = vreinterpretq_u16_s16(vmovl_s8(vreinterpret_s8_u8(vld1_u8(from))));
    widen_f16(vandq_u16(vshlq_n_u16(wide, 7), vdupq_n_u16(0xbf80)), pair);
    pair[0] = mul(pair[0], set1(256.0f));
    pair[1] = mul(pair[1], set1(256.0f));
  }

 private:
  static void widen_f16(uint16x8_t halves, F* pair) {
    const float16x8_t values = vreinterpretq_f16_u16(halves);
    pair[0] = vcvt_f32_f16(vget_low_f16(values));
    pair[1] = vcvt_high_f32_f16(values);
  }
  static uint8x16_t upper_halves(F first, F second) {
    return vreinterpretq_u8_u16(
        vuzp2q_u16(vreinterpretq_u16_f32(first), vreinterpretq_u16_f32(second)));
  }
  static uint8x8_t load_four(const uint8_t* from) {
    uint32_t four;
    __builtin_memcpy(&four, from, sizeof(four));
    return vcreate_u8(four);
  }
};

namespace {

// Operations on bytes of the kernels of int8-groups, with and without the dot product extension.
struct NeonBytes {
  using I = int32x4_t;
  static constexpr int32_t kSignedOffset = 0;
  static I both(I a, I b) { return vandq_s32(a, b); }
  static I either(I a, I b) { return vorrq_s32(a, b); }
  static I as_signed_codes(I bytes) { return bytes; }

  using ByteTable = int8x16_t;
  static ByteTable byte_table(const int8_t* values) { return vld1q_s8(values); }
  static I look_up_bytes(ByteTable table, I indices) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_s32(indices)));
  }

  static I fifth_bits(I bits, uint32_t w, uint32_t p) {
    // Each lane repeats the index of its own first byte; `w` then selects the byte.
    const uint32x4_t first = {0x00000000u, 0x04040404u, 0x08080808u, 0x0c0c0c0cu};
    const uint8x16_t places =
        vaddq_u8(vreinterpretq_u8_u32(first), vdupq_n_u8(static_cast<uint8_t>(w)));
    const uint8x16_t eights = vqtbl1q_u8(vreinterpretq_u8_s32(bits), places);
    const uint8x16_t is_set = vtstq_u8(eights, vreinterpretq_u8_u32(vdupq_n_u32(0x40100401u << p)));
    return vreinterpretq_s32_u8(vandq_u8(is_set, vdupq_n_u8(16)));
  }
};

}  // namespace
}  // namespace dflash::compute
