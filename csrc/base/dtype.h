// The element types that travel and in which weights are stored, and their conversions (IEEE, round
// to nearest even): of one element in dtype.cc, of many in convert.cc.
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
uint16_t f32_to_f16(float value);  // overflows to infinity, which the caller detects
float bf16_to_f32(uint16_t bits);
uint16_t f32_to_bf16(float value);

// Conversions of many elements are vectorised. Their pass also detects finite values that become
// infinite, which fail the call.

// Converts `count` elements. Source and destination must not overlap and need no alignment. Equal
// dtypes copy bits. Returns false if any finite value became infinite; all elements are written
// even then. NaN stays NaN and infinity stays infinity. The bits do not depend on the instruction
// set.
bool convert(Dtype from, const std::byte* source, Dtype to, std::byte* destination, size_t count);

// Widens to float32, which is exact.
void widen(Dtype from, const std::byte* source, float* destination, size_t count);

// Adds widen(source[i]) to accumulator[i] in float32, with one rounding per element.
void widen_add(Dtype from, const std::byte* source, float* accumulator, size_t count);

}  // namespace dflash
