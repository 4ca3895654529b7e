// Quantises a group in four vectors. The division, the clamp and the rounding are those of
// quantize_group, one IEEE operation each, so that the bits are too.
// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "compute/cpu/panels/quantize_groups.h"

namespace dflash::compute::internal {
namespace {

float largest_magnitude(const __m256* values) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  __m256 most = _mm256_andnot_ps(sign, values[0]);
  for (int i = 1; i < 4; ++i) most = _mm256_max_ps(most, _mm256_andnot_ps(sign, values[i]));
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

__m256i quantized(__m256 values, __m256 scale, __m256 limit) {
  // Adding and subtracting 1.5 * 2^23 rounds to an integer, half to even, because the floats from
  // 2^23 to 2^24 are the integers. That holds for magnitudes up to 2^22; here `limit`, 127 at most,
  // bounds them.
  const __m256 rounding = _mm256_set1_ps(12582912.0f);
  const __m256 quotient = _mm256_max_ps(_mm256_min_ps(_mm256_div_ps(values, scale), limit),
                                        _mm256_sub_ps(_mm256_setzero_ps(), limit));
  return _mm256_cvttps_epi32(_mm256_sub_ps(_mm256_add_ps(quotient, rounding), rounding));
}

}  // namespace

void quantize_groups_avx2(const float* values, uint32_t num_groups, float limit, int8_t* integers,
                          float* scales) {
  // Packing works within each half of the register, which leaves the words in this order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (uint32_t group = 0; group < num_groups; ++group, values += 32, integers += 32) {
    const __m256 rows[4] = {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8),
                            _mm256_loadu_ps(values + 16), _mm256_loadu_ps(values + 24)};
    const float scale = largest_magnitude(rows) / limit;
    scales[group] = scale;
    __m256i bytes = _mm256_setzero_si256();
    if (scale != 0.0f) {
      const __m256 divisor = _mm256_set1_ps(scale), bound = _mm256_set1_ps(limit);
      const __m256i low = _mm256_packs_epi32(quantized(rows[0], divisor, bound),
                                             quantized(rows[1], divisor, bound));
      const __m256i high = _mm256_packs_epi32(quantized(rows[2], divisor, bound),
                                              quantized(rows[3], divisor, bound));
      bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(integers), bytes);
  }
}

}  // namespace dflash::compute::internal
