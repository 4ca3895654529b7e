// The kernels for AVX2, FMA and F16C on int8 codes. VPMADDUBSW multiplies unsigned bytes with
// signed ones and adds pairs in 16 bits, which saturate if the first are signed codes moved by 128.
// Signed codes are therefore given as magnitudes, with their signs on the inputs.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct Avx2Dot {
  using I = __m256i;
  static constexpr int32_t kSignedOffset = 0;
  static constexpr uint32_t kTileRows = 2;
  static I both(I a, I b) { return _mm256_and_si256(a, b); }
  static I either(I a, I b) { return _mm256_or_si256(a, b); }
  static I as_signed_codes(I bytes) { return bytes; }

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    if constexpr (kIsSigned) {
      inputs = _mm256_sign_epi8(inputs, codes);
      codes = _mm256_abs_epi8(codes);  // at most 128, read as unsigned
    }
    return _mm256_add_epi32(
        sum, _mm256_madd_epi16(_mm256_maddubs_epi16(codes, inputs), _mm256_set1_epi16(1)));
  }

  using ByteTable = __m256i;
  static ByteTable byte_table(const int8_t* values) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
  }
  static I look_up_bytes(ByteTable table, I indices) { return _mm256_shuffle_epi8(table, indices); }

  static I fifth_bits(I bits, uint32_t w, uint32_t p) {
    const I first = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404,
                                      0x08080808, 0x0c0c0c0c);
    const I eights =
        _mm256_shuffle_epi8(bits, _mm256_add_epi8(first, _mm256_set1_epi8(static_cast<char>(w))));
    const I wanted = _mm256_set1_epi32(static_cast<int>(0x40100401u << p));
    return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(eights, wanted), wanted),
                            _mm256_set1_epi8(16));
  }
};

}  // namespace

constinit const KernelSet kAvx2Int8 = make_int8_set<Avx2Vector, Avx2Dot>();

}  // namespace dflash::compute
#endif
