// The vector type of activation.h and canonical_products.h in 512 bits. Included by files that are
// compiled for AVX-512 only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12's own headers start from an undefined vector
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include <cstdint>

namespace dflash::compute {

struct Avx512Vector {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  // Of 32 registers, the rest hold weights and broadcast inputs.
  static constexpr int kAccumulators = 24;
  static constexpr int kMaxTileRows = 12;

  static F set1(float value) { return _mm512_set1_ps(value); }
  static F load(const float* from) { return _mm512_loadu_ps(from); }
  static void store(float* to, F value) { _mm512_storeu_ps(to, value); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  // Masked, because GCC 12 warns of the undefined vector from which the plain one starts.
  static F sqrt(F a) { return _mm512_maskz_sqrt_ps(0xffff, a); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F select_greater(F a, F b, F x, F y) {
    return _mm512_mask_mov_ps(y, _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), x);
  }
  static I bits(F value) { return _mm512_castps_si512(value); }
  static F from_bits(I bits) { return _mm512_castsi512_ps(bits); }
  static I set1i(int32_t value) { return _mm512_set1_epi32(value); }
  static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I halve(I value) { return _mm512_srai_epi32(value, 1); }
  static F power_of_two(I n) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
  }
  static F canonical_nan(F value) {
    const F nan = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
    return _mm512_mask_mov_ps(value, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), nan);
  }

  struct F16 {
    uint16_t bits;
  };
  struct BF16 {
    uint16_t bits;
  };
  static void load_weights(const float* from, F* pair) {
    pair[0] = _mm512_load_ps(from);
    pair[1] = _mm512_load_ps(from + 16);
  }
  static void load_weights(const F16* from, F* pair) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(from);
    pair[0] = _mm512_cvtph_ps(_mm256_load_si256(halves));
    pair[1] = _mm512_cvtph_ps(_mm256_load_si256(halves + 1));
  }
  // Elements alternate between the two vectors (pack.h), so that a shift and a mask widen them.
  static void load_weights(const BF16* from, F* pair) {
    const __m512i both = _mm512_load_si512(from);
    pair[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    pair[1] = _mm512_castsi512_ps(
        _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }

  // Loads adjacent elements that are stored one after another; no address need be aligned.
  static F load_adjacent(const float* from) { return _mm512_loadu_ps(from); }
  static F load_adjacent(const F16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static F load_adjacent(const BF16* from) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
  }

  // What follows reads quantised weights (quantized_formats.h), whose addresses are not aligned.
  using Words = uint32_t __attribute__((vector_size(64)));
  using SignedWords = int32_t __attribute__((vector_size(64)));
  using Table = __m512;
  static Table table(const float* values) { return _mm512_loadu_ps(values); }
  // Looks up by the low four bits; the permutation ignores those above.
  static F look_up(Table table, I index) { return _mm512_permutexvar_ps(index, table); }
  // The same by the low three bits, in a table whose halves are equal.
  static F look_up_eight(Table table, I index) { return look_up(table, index); }
  static I load_words(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static I shift_right(I value, uint32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(value) >> count);
  }
  static I shift_left(I value, uint32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<Words>(value) << count);
  }
  static I shift_right_signed(I value, int32_t count) {
    return reinterpret_cast<I>(reinterpret_cast<SignedWords>(value) >> count);
  }
  // Bit by bit a where the mask is set, else b.
  static I merge(I mask, I a, I b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
  // A float in [1, 2) with those bits of `mantissa` that the mask has.
  static F one_and(I mantissa, I mask) {
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(mantissa, mask, _mm512_set1_epi32(0x3f800000), 0xea));
  }
  static F to_float(I value) { return _mm512_cvtepi32_ps(value); }
  static F load_f16(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static I widen_u8(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static I widen_u16(const uint8_t* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static F load_u8(const uint8_t* from) { return to_float(widen_u8(from)); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static I gather(const uint32_t* table, I index) {
    return _mm512_i32gather_epi32(index, table, 4);
  }
  static F load_i8(const uint8_t* from) {
    return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  // 2^(byte - 127) for bytes below 255; byte 0 gives the subnormal 2^-127.
  static F load_exponents(const uint8_t* from) {
    const I exponents = widen_u8(from);
    const __mmask16 is_subnormal = _mm512_cmpeq_epi32_mask(exponents, _mm512_setzero_si512());
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(exponents, 23), is_subnormal,
                                                     _mm512_set1_epi32(0x00400000)));
  }
  // An e4m3 moved to where f16 has sign, exponent and mantissa is the value divided by 2^8, which
  // holds for subnormals too.
  static void load_e4m3(const uint8_t* from, F* pair) {
    const __m512i wide =
        _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    const __m512i halves = _mm512_and_si512(_mm512_slli_epi16(wide, 7),
                                            _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    pair[0] = mul(_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), set1(256.0f));
    pair[1] = mul(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1)), set1(256.0f));
  }
};

namespace {

// Operations on bytes of the kernels of int8-groups, with and without VNNI.
struct Avx512Bytes {
  using I = __m512i;
  static I both(I a, I b) { return _mm512_and_si512(a, b); }
  static I either(I a, I b) { return _mm512_or_si512(a, b); }

  using ByteTable = __m512i;
  static ByteTable byte_table(const int8_t* values) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  static I look_up_bytes(ByteTable table, I indices) { return _mm512_shuffle_epi8(table, indices); }

  static I fifth_bits(I bits, uint32_t w, uint32_t p) {
    // Each lane repeats the index of its own first byte; `w` then selects the byte.
    const I first = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0x00000000);
    const I eights =
        _mm512_shuffle_epi8(bits, _mm512_add_epi8(first, _mm512_set1_epi8(static_cast<char>(w))));
    const I wanted = _mm512_set1_epi32(static_cast<int>(0x40100401u << p));
    return _mm512_maskz_set1_epi8(_mm512_test_epi8_mask(eights, wanted), 16);
  }
};

}  // namespace
}  // namespace dflash::compute
