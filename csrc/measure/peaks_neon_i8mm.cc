// The integer peak loop of neon_i8mm.
// SPDX-License-Identifier: Apache-2.0
#if defined(__aarch64__)
#include <arm_neon.h>

#include "measure/integer_peak_loop.h"
#include "measure/peaks.h"

namespace dflash::measure {
namespace {

struct Bytes {
  using I = int32x4_t;
  static constexpr int kBytes = 32, kChains = 16;  // products per instruction
  static I zero() { return vdupq_n_s32(0); }
  static I bytes(int8_t value) { return vreinterpretq_s32_s8(vdupq_n_s8(value)); }
  static I add_products(I sum, I a, I b) {
    return vmmlaq_s32(sum, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
  }
};

}  // namespace

uint64_t integer_multiply_add_neon_i8mm(uint64_t rounds, float* sink) {
  return integer_multiply_add_loop<Bytes>(rounds, sink);
}

}  // namespace dflash::measure
#endif
