// Operations on bytes for the NEON kernels of int8-groups, with and without the dot product
// extension. Included by their files only.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace dflash::compute {
namespace {

struct NeonBytes {
  using I = int32x4_t;
  static constexpr int32_t kSignedOffset = 0;
  static I both(I a, I b) { return vandq_s32(a, b); }
  static I either(I a, I b) { return vorrq_s32(a, b); }
  static I as_signed_codes(I bytes) { return bytes; }

  using ByteTable = int8x16_t;
  static ByteTable byte_table(const int8_t* values) { return vld1q_s8(values); }
  static I look_up_bytes(ByteTable table, I indices) {
    return vreinterpretq_s32_s8(vqtbl1q_s8(table, vreinterpretq_u8_s32(indices)));
  }

  static I fifth_bits(I bits, uint32_t w, uint32_t p) {
    // Each lane repeats the index of its own first byte; `w` then selects the byte.
    const uint32x4_t first = {0x00000000u, 0x04040404u, 0x08080808u, 0x0c0c0c0cu};
    const uint8x16_t places =
        vaddq_u8(vreinterpretq_u8_u32(first), vdupq_n_u8(static_cast<uint8_t>(w)));
    const uint8x16_t eights = vqtbl1q_u8(vreinterpretq_u8_s32(bits), places);
    const uint8x16_t is_set = vtstq_u8(eights, vreinterpretq_u8_u32(vdupq_n_u32(0x40100401u << p)));
    return vreinterpretq_s32_u8(vandq_u8(is_set, vdupq_n_u8(16)));
  }
};

}  // namespace
}  // namespace dflash::compute
