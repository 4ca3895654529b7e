// Operations on bytes for the 512-bit kernels of int8-groups, with and without VNNI. Included by
// their files only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12's broadcasts, see vector_avx512.h
#endif
#include <immintrin.h>

#include <cstdint>

namespace dflash::compute {
namespace {

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
