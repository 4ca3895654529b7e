// The kernels for AVX-512 (F, BW, VL, DQ) on int8 codes, without VNNI. VPMADDUBSW multiplies
// unsigned bytes with signed ones and adds pairs in 16 bits, which saturate if the first are signed
// codes moved by 128. Signed codes are therefore given as magnitudes, with their signs on the
// inputs.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/kernels/int8_products.h"

namespace dflash::compute {
namespace {

struct Avx512Dot : Avx512Bytes {
  static constexpr int32_t kSignedOffset = 0;
  static constexpr uint32_t kTileRows = 5;
  static I as_signed_codes(I bytes) { return bytes; }

  template <bool kIsSigned>
  [[gnu::always_inline]] static inline I dot(I codes, I inputs, I sum) {
    if constexpr (kIsSigned) {
      inputs =
          _mm512_mask_sub_epi8(inputs, _mm512_movepi8_mask(codes), _mm512_setzero_si512(), inputs);
      codes = _mm512_abs_epi8(codes);  // at most 128, read as unsigned
    }
    return _mm512_add_epi32(
        sum, _mm512_madd_epi16(_mm512_maddubs_epi16(codes, inputs), _mm512_set1_epi16(1)));
  }
};

}  // namespace

constinit const KernelSet kAvx512Int8 = make_int8_set<Avx512Vector, Avx512Dot>();

}  // namespace dflash::compute
#endif
