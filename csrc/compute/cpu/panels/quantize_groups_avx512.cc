// Quantises a group in two vectors. The division, the clamp and the rounding are those of
// quantize_group, one IEEE operation each, so that the bits are too.
// SPDX-License-Identifier: Apache-2.0
// GCC 12 warns of undefined operands that are inside its own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include "compute/cpu/panels/quantize_groups.h"

namespace dflash::compute::internal {
namespace {

__m128i quantized(__m512 values, __m512 scale, __m512 limit) {
  // Adding and subtracting 1.5 * 2^23 rounds to an integer, half to even, because the floats from
  // 2^23 to 2^24 are the integers. That holds for magnitudes up to 2^22; here `limit`, 127 at most,
  // bounds them.
  const __m512 rounding = _mm512_set1_ps(12582912.0f);
  const __m512 quotient = _mm512_max_ps(_mm512_min_ps(_mm512_div_ps(values, scale), limit),
                                        _mm512_sub_ps(_mm512_setzero_ps(), limit));
  return _mm512_cvtepi32_epi8(
      _mm512_cvttps_epi32(_mm512_sub_ps(_mm512_add_ps(quotient, rounding), rounding)));
}

}  // namespace

void quantize_groups_avx512(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                            float* scales) {
  for (uint32_t group = 0; group < num_groups; ++group, values += 32, integers += 32) {
    const __m512 first = _mm512_loadu_ps(values), second = _mm512_loadu_ps(values + 16);
    const float scale =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(first), _mm512_abs_ps(second))) / limit;
    scales[group] = scale;
    const __m512 divisor = _mm512_set1_ps(scale), bound = _mm512_set1_ps(limit);
    const __m128i zero = _mm_setzero_si128();
    auto* to = reinterpret_cast<__m128i*>(integers);
    _mm_storeu_si128(to, scale == 0.0f ? zero : quantized(first, divisor, bound));
    _mm_storeu_si128(to + 1, scale == 0.0f ? zero : quantized(second, divisor, bound));
  }
}

}  // namespace dflash::compute::internal
