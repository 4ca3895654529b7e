// The integer peak loop of avx512vnni.
// SPDX-License-Identifier: Apache-2.0
#if defined(__x86_64__)
#include "compute/cpu/kernels/vector_avx512.h"

#include "compute/cpu/integer_peak_loop.h"
#include "compute/cpu/peaks.h"

namespace dflash::compute {
namespace {

struct Bytes {
  using I = __m512i;
  static constexpr int kBytes = 64, kChains = 16;
  static I zero() { return _mm512_setzero_si512(); }
  static I bytes(int8_t value) { return _mm512_set1_epi8(value); }
  static I add_products(I sum, I a, I b) { return _mm512_dpbusd_epi32(sum, a, b); }
};

}  // namespace

uint64_t integer_multiply_add_avx512vnni(uint64_t rounds, float* sink) {
  return integer_multiply_add_loop<Bytes>(rounds, sink);
}

}  // namespace dflash::compute
#endif
