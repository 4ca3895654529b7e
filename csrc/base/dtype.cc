// Scalar conversions between float32 and the 16-bit types. They use integer arithmetic, so that no
// floating-point mode changes them. The whole project has one rule for NaN: narrowing keeps the
// sign and the leading bits of the payload and sets the quiet bit, and widening f16 sets that too.
// SPDX-License-Identifier: Apache-2.0
#include "base/dtype.h"

#include <bit>

namespace dflash {

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  const uint32_t exponent = (bits >> 10) & 0x1fu;
  const uint32_t mantissa = bits & 0x3ffu;
  if (exponent == 0x1f) {
    const uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return std::bit_cast<float>(sign | 0x7f800000u | quiet | (mantissa << 13));
  }
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // A subnormal is mantissa * 2^-24; its leading one becomes the implicit bit.
  const uint32_t leading = 31u - static_cast<uint32_t>(std::countl_zero(mantissa));
  return std::bit_cast<float>(sign | ((leading + 103u) << 23) |
                              ((mantissa << (23u - leading)) & 0x7fffffu));
}

uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u)
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  // Magnitudes of 65520 and more round to infinity.
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  // Magnitudes of 2^-14 and more are normal in f16.
  if (magnitude >= 0x38800000u) {
    const uint32_t rebiased = magnitude - (112u << 23);
    return static_cast<uint16_t>(sign | ((rebiased + 0xfffu + ((rebiased >> 13) & 1u)) >> 13));
  }
  const uint32_t exponent = magnitude >> 23;
  // Magnitudes below 2^-25, half of the smallest subnormal, round to zero.
  if (exponent < 102u) return static_cast<uint16_t>(sign);
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t shift = 126u - exponent;
  const uint32_t half = 1u << (shift - 1u);
  const uint32_t rest = mantissa & ((1u << shift) - 1u);
  uint32_t quotient = mantissa >> shift;
  if (rest > half || (rest == half && (quotient & 1u) != 0)) ++quotient;
  return static_cast<uint16_t>(sign | quotient);
}

float bf16_to_f32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace dflash
