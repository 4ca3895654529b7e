// The conversion loops with AVX2 and F16C. Tails run the scalar table, which gives the same bits.
// Nothing from std:: is instantiated here, because an inline copy compiled with wide instructions
// could be linked into portable code.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include <immintrin.h>

#include "base/convert_kernels.h"

namespace dflash::internal {
namespace {

inline __m256 load_f32(const std::byte* at) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}
inline __m128i load_u16(const std::byte* at) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
}

// All ones in the lanes whose finite value rounds to infinity.
template <uint32_t kOverflow>
inline __m256i overflows(__m256i bits) {
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  return _mm256_and_si256(
      _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(static_cast<int>(kOverflow - 1))),
      _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(kInfinity)), magnitude));
}

bool narrow_f16(const std::byte* source, std::byte* destination, size_t count) {
  __m256i bad = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 value = load_f32(source + 4 * i);
    bad = _mm256_or_si256(bad, overflows<kF16Overflow>(_mm256_castps_si256(value)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + 2 * i),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
  const bool tail_in_range =
      kConvertScalar.narrow_f16(source + 4 * i, destination + 2 * i, count - i);
  return _mm256_testz_si256(bad, bad) != 0 && tail_in_range;
}

inline __m256i round_bf16(__m256i bits) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
  const __m256i is_nan =
      _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(static_cast<int>(kInfinity)));
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}

bool narrow_bf16(const std::byte* source, std::byte* destination, size_t count) {
  __m256i bad = _mm256_setzero_si256();
  size_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i low = _mm256_castps_si256(load_f32(source + 4 * i));
    const __m256i high = _mm256_castps_si256(load_f32(source + 4 * i + 32));
    bad = _mm256_or_si256(
        bad, _mm256_or_si256(overflows<kBF16Overflow>(low), overflows<kBF16Overflow>(high)));
    // Packing works within halves of the register, which leaves quarters in the order 0 2 1 3.
    const __m256i packed = _mm256_packus_epi32(round_bf16(low), round_bf16(high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + 2 * i),
                        _mm256_permute4x64_epi64(packed, 0xd8));
  }
  const bool tail_in_range =
      kConvertScalar.narrow_bf16(source + 4 * i, destination + 2 * i, count - i);
  return _mm256_testz_si256(bad, bad) != 0 && tail_in_range;
}

inline __m256 widen_bf16_at(const std::byte* at) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_u16(at)), 16));
}
inline __m256 widen_f16_at(const std::byte* at) { return _mm256_cvtph_ps(load_u16(at)); }

void widen_f16(const std::byte* source, float* destination, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(destination + i, widen_f16_at(source + 2 * i));
  kConvertScalar.widen_f16(source + 2 * i, destination + i, count - i);
}
void widen_bf16(const std::byte* source, float* destination, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) _mm256_storeu_ps(destination + i, widen_bf16_at(source + 2 * i));
  kConvertScalar.widen_bf16(source + 2 * i, destination + i, count - i);
}

inline void add_at(float* accumulator, __m256 value) {
  const __m256 sum = _mm256_add_ps(_mm256_loadu_ps(accumulator), value);
  const __m256 canonical = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kCanonicalNan)));
  _mm256_storeu_ps(accumulator,
                   _mm256_blendv_ps(sum, canonical, _mm256_cmp_ps(sum, sum, _CMP_UNORD_Q)));
}

void widen_add_f32(const std::byte* source, float* accumulator, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) add_at(accumulator + i, load_f32(source + 4 * i));
  kConvertScalar.widen_add_f32(source + 4 * i, accumulator + i, count - i);
}
void widen_add_f16(const std::byte* source, float* accumulator, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) add_at(accumulator + i, widen_f16_at(source + 2 * i));
  kConvertScalar.widen_add_f16(source + 2 * i, accumulator + i, count - i);
}
void widen_add_bf16(const std::byte* source, float* accumulator, size_t count) {
  size_t i = 0;
  for (; i + 8 <= count; i += 8) add_at(accumulator + i, widen_bf16_at(source + 2 * i));
  kConvertScalar.widen_add_bf16(source + 2 * i, accumulator + i, count - i);
}

}  // namespace

const ConvertKernels kConvertAvx2 = {narrow_f16,    narrow_bf16,   widen_f16,     widen_bf16,
                                     widen_add_f32, widen_add_f16, widen_add_bf16};

}  // namespace dflash::internal
#endif
