// Conversions between float32 and the 16-bit types in integer arithmetic, bit for bit those of
// base/dtype.h. They depend on neither vendor's half types.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "base/dtype.h"
#include "cards/portable.h"

namespace dflash::compute::gpu {

GPU_FN float widen_f16(uint32_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {
    const uint32_t quiet = magnitude > 0x7c00u ? 0x400000u : 0u;
    return float_of(sign | 0x7f800000u | quiet | (magnitude & 0x3ffu) << 13);
  }
  // The exponent field of float32 is 112 higher; the product is exact, and normalises what is
  // subnormal in f16.
  return float_of(sign | bits_of(mul(float_of(magnitude << 13), 0x1p112f)));
}
GPU_FN float widen_bf16(uint32_t half) { return float_of(half << 16); }
GPU_FN float widen_16(Dtype dtype, uint32_t half) {
  return dtype == Dtype::kF16 ? widen_f16(half) : widen_bf16(half);
}

GPU_FN uint32_t narrow_f16(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u | (magnitude >> 13 & 0x3ffu);
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and more round to infinity
  if (magnitude >= 0x38800000u) {                       // 2^-14: normal in f16
    const uint32_t rebiased = magnitude - (112u << 23);
    return sign | (rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13;
  }
  // Adding 1/2 leaves the value rounded to a multiple of 2^-24, half to even, in the low bits.
  return sign | (bits_of(add(float_of(magnitude), 0.5f)) - 0x3f000000u);
}
GPU_FN uint32_t narrow_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
GPU_FN bool is_finite(float value) { return (bits_of(value) & 0x7f800000u) != 0x7f800000u; }
GPU_FN bool is_nan(float value) { return (bits_of(value) & 0x7fffffffu) > 0x7f800000u; }

}  // namespace dflash::compute::gpu
