// Pairs of f16 in a word, the first in the low half, which is what class f16-dot2 multiplies. AMD's
// cards do it by v_dot2_f32_f16 and the packed instructions. The simulator computes in float32, and
// its dot2() adds the products one after the other, one fma each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/convert_floats.h"

namespace dflash::compute::gpu {

#if defined(DFLASH_GPU_SIM) || defined(__gfx906__) || defined(__gfx908__) ||                      \
    defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx1030__) || defined(__gfx1100__) || \
    defined(__gfx1201__)
inline constexpr bool kHasDot2 = true;
#else
// No device of such a target offers the class, and its kernels only stop.
inline constexpr bool kHasDot2 = false;
#endif

#if defined(DFLASH_GPU_SIM) || !(defined(__HIP__) || defined(__HIPCC__))

// Rounds two floats to f16, to nearest even.
GPU_FN uint32_t half_pair(float low, float high) {
  return narrow_f16(low) | narrow_f16(high) << 16;
}
GPU_FN float low_half(uint32_t pair) { return widen_f16(pair & 0xffffu); }
GPU_FN float high_half(uint32_t pair) { return widen_f16(pair >> 16); }
GPU_FN uint32_t add_pairs(uint32_t a, uint32_t b) {
  return half_pair(add(low_half(a), low_half(b)), add(high_half(a), high_half(b)));
}
// sum + a[0] * b[0] + a[1] * b[1]. In which order and how precisely these are added is the
// vendor's.
GPU_FN float dot2(uint32_t a, uint32_t b, float sum) {
  return fused(high_half(a), high_half(b), fused(low_half(a), low_half(b), sum));
}

#else

using HalfPair = _Float16 __attribute__((ext_vector_type(2)));

GPU_FN uint32_t half_pair(float low, float high) {
  const HalfPair pair = {static_cast<_Float16>(low), static_cast<_Float16>(high)};
  return __builtin_bit_cast(uint32_t, pair);
}
GPU_FN float low_half(uint32_t pair) {
  return static_cast<float>(__builtin_bit_cast(HalfPair, pair)[0]);
}
GPU_FN float high_half(uint32_t pair) {
  return static_cast<float>(__builtin_bit_cast(HalfPair, pair)[1]);
}
GPU_FN uint32_t add_pairs(uint32_t a, uint32_t b) {
  return __builtin_bit_cast(uint32_t,
                            __builtin_bit_cast(HalfPair, a) + __builtin_bit_cast(HalfPair, b));
}
GPU_FN float dot2(uint32_t a, uint32_t b, float sum) {
  return __builtin_amdgcn_fdot2(__builtin_bit_cast(HalfPair, a), __builtin_bit_cast(HalfPair, b),
                                sum, false);
}

#endif

// Makes a pair of the signed bytes 0 and 1, or 2 and 3, of a word. The f16 1024 with c + 128 in its
// low bits is 1152 + c, and subtracting 1152 is exact.
GPU_FN uint32_t low_bytes_as_pair(uint32_t bytes) {
  return add_pairs(pick_bytes(bytes ^ 0x80808080u, 0x64646464u, 0x04010400u), 0xe480e480u);
}
GPU_FN uint32_t high_bytes_as_pair(uint32_t bytes) {
  return add_pairs(pick_bytes(bytes ^ 0x80808080u, 0x64646464u, 0x04030402u), 0xe480e480u);
}

}  // namespace dflash::compute::gpu
