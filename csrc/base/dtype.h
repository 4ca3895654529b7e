// The element types that travel and in which weights are stored, and their scalar conversions
// (IEEE, round to nearest even).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash {

// The values are on the wire, so that new ones are only appended.
enum class Dtype : uint8_t { kF32 = 0, kF16 = 1, kBF16 = 2 };
inline constexpr uint8_t kNumDtypes = 3;

constexpr size_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }
constexpr const char* dtype_name(Dtype dtype) {
  return dtype == Dtype::kF32 ? "f32" : dtype == Dtype::kF16 ? "f16" : "bf16";
}

float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);  // overflows to infinity, which the caller detects (convert.h)
float bf16_to_f32(uint16_t bits);
uint16_t f32_to_bf16(float value);

}  // namespace dflash
