// The peak loops of avx2, for float32 and for bytes.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx2.h"

#include "measure/integer_peak_loop.h"
#include "measure/peak_loops.h"

namespace dflash::measure {

constinit const PeakLoops kAvx2Peaks = make_peak_loops<compute::Avx2Vector>();

namespace {

struct Bytes {
  using I = __m256i;
  static constexpr int kBytes = 32, kChains = 8;
  static I zero() { return _mm256_setzero_si256(); }
  static I bytes(int8_t value) { return _mm256_set1_epi8(value); }
  static I add_products(I sum, I a, I b) {
    asm volatile("" : "+v"(a));  // otherwise the compiler multiplies once for all chains
    return _mm256_add_epi32(sum,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16(1)));
  }
};

}  // namespace

uint64_t integer_multiply_add_avx2(uint64_t rounds, float* sink) {
  return integer_multiply_add_loop<Bytes>(rounds, sink);
}

}  // namespace dflash::measure
#endif
