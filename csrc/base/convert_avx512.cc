// The conversion loops with AVX-512 (F, BW, VL, DQ). Masked loads and stores take the tails.
// Nothing from std:: is instantiated here, because an inline copy compiled with wide instructions
// could be linked into portable code.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#if !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC 12's own headers start from an undefined vector
#endif
#include <immintrin.h>

#include "base/convert_kernels.h"

namespace dflash::internal {
namespace {

inline __mmask16 first_lanes(size_t left) {
  return static_cast<__mmask16>(left >= 16 ? 0xffffu : (1u << left) - 1u);
}

template <uint32_t kOverflow>
inline __mmask16 overflows(__m512i bits) {
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __m512i above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(static_cast<int>(kOverflow)));
  return _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32(static_cast<int>(kInfinity - kOverflow)));
}

inline __m256i round_f16(__m512i bits) {
  return _mm512_cvtps_ph(_mm512_castsi512_ps(bits), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

inline __m256i round_bf16(__m512i bits) {
  const __m512i high = _mm512_srli_epi32(bits, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
  const __mmask16 is_nan =
      _mm512_cmpgt_epu32_mask(magnitude, _mm512_set1_epi32(static_cast<int>(kInfinity)));
  return _mm512_cvtepi32_epi16(
      _mm512_mask_or_epi32(rounded, is_nan, high, _mm512_set1_epi32(0x40)));
}

template <uint32_t kOverflow, __m256i (*kRound)(__m512i)>
bool narrow(const std::byte* source, std::byte* destination, size_t count) {
  unsigned bad = 0;
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512i bits = _mm512_maskz_loadu_epi32(lanes, source + 4 * i);
    bad |= overflows<kOverflow>(bits);
    _mm256_mask_storeu_epi16(destination + 2 * i, lanes, kRound(bits));
  }
  return bad == 0;
}

inline __m512 load_f32(__mmask16 lanes, const std::byte* source, size_t i) {
  return _mm512_maskz_loadu_ps(lanes, source + 4 * i);
}
inline __m512 load_f16(__mmask16 lanes, const std::byte* source, size_t i) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, source + 2 * i));
}
inline __m512 load_bf16(__mmask16 lanes, const std::byte* source, size_t i) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source + 2 * i));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

template <__m512 (*kLoad)(__mmask16, const std::byte*, size_t)>
void widen(const std::byte* source, float* destination, size_t count) {
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    _mm512_mask_storeu_ps(destination + i, lanes, kLoad(lanes, source, i));
  }
}

template <__m512 (*kLoad)(__mmask16, const std::byte*, size_t)>
void widen_add(const std::byte* source, float* accumulator, size_t count) {
  const __m512 canonical = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(kCanonicalNan)));
  for (size_t i = 0; i < count; i += 16) {
    const __mmask16 lanes = first_lanes(count - i);
    const __m512 sum =
        _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, accumulator + i), kLoad(lanes, source, i));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q);
    _mm512_mask_storeu_ps(accumulator + i, lanes, _mm512_mask_mov_ps(sum, is_nan, canonical));
  }
}

}  // namespace

const ConvertKernels kConvertAvx512 = {narrow<kF16Overflow, round_f16>,
                                       narrow<kBF16Overflow, round_bf16>,
                                       widen<load_f16>,
                                       widen<load_bf16>,
                                       widen_add<load_f32>,
                                       widen_add<load_f16>,
                                       widen_add<load_bf16>};

}  // namespace dflash::internal
#endif
