// The vector type of activation.h and canonical_products.h in 256 bits. Included by files that are
// compiled for AVX2 only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace dflash::compute {

struct Avx2Vector {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  // Of 16 registers, two hold weights and one the broadcast input.
  static constexpr int kAccumulators = 12;
  static constexpr int kMaxTileRows = 6;

  static F set1(float value) { return _mm256_set1_ps(value); }
  static F load(const float* from) { return _mm256_loadu_ps(from); }
  static void store(float* to, F value) { _mm256_storeu_ps(to, value); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F select_greater(F a, F b, F x, F y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
  }
  static I bits(F value) { return _mm256_castps_si256(value); }
  static F from_bits(I bits) { return _mm256_castsi256_ps(bits); }
  static I set1i(int32_t value) { return _mm256_set1_epi32(value); }
  static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I halve(I value) { return _mm256_srai_epi32(value, 1); }
  static F power_of_two(I n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  static F canonical_nan(F value) {
    const F nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  }

  struct F16 {
    uint16_t bits;
  };
  struct BF16 {
    uint16_t bits;
  };
  static void load_weights(const float* from, F* pair) {
    pair[0] = _mm256_load_ps(from);
    pair[1] = _mm256_load_ps(from + 8);
  }
  static void load_weights(const F16* from, F* pair) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    pair[0] = _mm256_cvtph_ps(_mm_load_si128(halves));
    pair[1] = _mm256_cvtph_ps(_mm_load_si128(halves + 1));
  }
  // Elements alternate between the two vectors (pack.h), so that a shift and a mask widen them.
  static void load_weights(const BF16* from, F* pair) {
    const __m256i both = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
    pair[0] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
    pair[1] = _mm256_castsi256_ps(
        _mm256_and_si256(both, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // Loads adjacent elements that are stored one after another; no address need be aligned.
  static F load_adjacent(const float* from) { return _mm256_loadu_ps(from); }
  static F load_adjacent(const F16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static F load_adjacent(const BF16* from) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
  }

  // What follows reads quantised weights (quantized_formats.h), whose addresses are not aligned.
  using Words = uint32_t __attribute__((vector_size(32)));
  using SignedWords = int32_t __attribute__((vector_size(32)));
  struct Table {
    __m256 low, high;
  };
  static Table table(const float* values) {
    return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
  }
  // Looks up by the low four bits: a permutation sees three of them, the fourth chooses the half.
  static F look_up(const Table& table, I index) {
    const F low = _mm256_permutevar8x32_ps(table.low, index),
            high = _mm256_permutevar8x32_ps(table.high, index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }
  // Looks up by the low three bits, in a table whose halves are equal.
  static F look_up_eight(const Table& table, I index) {
    return _mm256_permutevar8x32_ps(table.low, index);
  }
  static I load_words(const uint8_t* from) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  }
  static I shift_right(I value, uint32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(value) >> count);
  }
  static I shift_left(I value, uint32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(value) << count);
  }
  static I shift_right_signed(I value, int32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<SignedWords>(value) >> count);
  }
  static I merge(I mask, I a, I b) {
    return _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b));
  }
  // A float in [1, 2) with those bits of `mantissa` that the mask has.
  static F one_and(I mantissa, I mask) {
    return _mm256_castsi256_ps(
        _mm256_or_si256(_mm256_and_si256(mantissa, mask), _mm256_set1_epi32(0x3f800000)));
  }
  static F to_float(I value) { return _mm256_cvtepi32_ps(value); }
  static F load_f16(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static I widen_u8(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static I widen_u16(const uint8_t* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static F load_u8(const uint8_t* from) { return to_float(widen_u8(from)); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I gather(const uint32_t* table, I index) {
    return _mm256_i32gather_epi32(reinterpret_cast<const int*>(table), index, 4);
  }
  static F load_i8(const uint8_t* from) {
    return to_float(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  // 2^(byte - 127) for bytes below 255; byte 0 gives the subnormal 2^-127.
  static F load_exponents(const uint8_t* from) {
    const I exponents = widen_u8(from);
    const I is_subnormal = _mm256_cmpeq_epi32(exponents, _mm256_setzero_si256());
    return _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_slli_epi32(exponents, 23),
                                                  _mm256_set1_epi32(0x00400000), is_subnormal));
  }
  // An e4m3 moved to where f16 has sign, exponent and mantissa is the value divided by 2^8, which
  // holds for subnormals too.
  static void load_e4m3(const uint8_t* from, F* pair) {
    const __m256i wide =
        _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7),
                                            _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    pair[0] = mul(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), set1(256.0f));
    pair[1] = mul(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), set1(256.0f));
  }
};

}  // namespace dflash::compute
