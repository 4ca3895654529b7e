// The peak loops of avx512, for float32 and for bytes.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "measure/integer_peak_loop.h"
#include "measure/peak_loops.h"

namespace dflash::measure {

constinit const PeakLoops kAvx512Peaks = make_peak_loops<compute::Avx512Vector>();

namespace {

struct Bytes {
  using I = __m512i;
  static constexpr int kBytes = 64, kChains = 12;
  static I zero() { return _mm512_setzero_si512(); }
  static I bytes(int8_t value) { return _mm512_set1_epi8(value); }
  static I add_products(I sum, I a, I b) {
    asm volatile("" : "+v"(a));  // otherwise the compiler multiplies once for all chains
    return _mm512_add_epi32(sum,
                            _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), _mm512_set1_epi16(1)));
  }
};

}  // namespace

uint64_t integer_multiply_add_avx512(uint64_t rounds, float* sink) {
  return integer_multiply_add_loop<Bytes>(rounds, sink);
}

}  // namespace dflash::measure
#endif
