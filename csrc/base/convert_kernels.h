// The seam between convert.cc and instruction sets: one table of loops per set, all of which give
// the same bits. Private to base and its tests. Pointers are to bytes because rows in a frame are
// not aligned.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace dflash::internal {

// narrow_* return false if a finite value became infinite. widen_add_* store a NaN sum as
// 0x7fc00000, because which operand's payload survives an addition is the compiler's choice.
struct ConvertKernels {
  bool (*narrow_f16)(const std::byte* source, std::byte* destination, size_t count);
  bool (*narrow_bf16)(const std::byte* source, std::byte* destination, size_t count);
  void (*widen_f16)(const std::byte* source, float* destination, size_t count);
  void (*widen_bf16)(const std::byte* source, float* destination, size_t count);
  void (*widen_add_f32)(const std::byte* source, float* accumulator, size_t count);
  void (*widen_add_f16)(const std::byte* source, float* accumulator, size_t count);
  void (*widen_add_bf16)(const std::byte* source, float* accumulator, size_t count);
};

// Finite float32 values round to infinity if their magnitude (the sign bit cleared) is in
// [limit, kInfinity), where the limit is kF16Overflow or kBF16Overflow.
inline constexpr uint32_t kInfinity = 0x7f800000u;
// This is 65520, half a step above 65504; the tie goes to the even one, infinity.
inline constexpr uint32_t kF16Overflow = 0x477ff000u;
inline constexpr uint32_t kBF16Overflow = 0x7f7f8000u;  // half a step above the largest bf16
inline constexpr uint32_t kCanonicalNan = 0x7fc00000u;

extern const ConvertKernels kConvertScalar;
#if defined(__x86_64__)
extern const ConvertKernels kConvertAvx2;    // AVX2 and F16C
extern const ConvertKernels kConvertAvx512;  // AVX-512 F, BW, VL, DQ
#elif defined(__aarch64__)
extern const ConvertKernels kConvertNeon;
#endif

// Whether this processor runs the table, or has the extension.
bool has_avx2_f16c();
bool has_avx512();
bool has_avx512_vnni();
bool has_avx512_bf16();
// Extensions of AArch64 that the kernel sets neon_dotprod, neon_i8mm and neon_bf16 need.
bool has_neon_dotprod();
bool has_neon_i8mm();
bool has_neon_bf16();
constexpr bool has_neon() {  // every AArch64 has it
#if defined(__aarch64__)
  return true;
#else
  return false;
#endif
}

}  // namespace dflash::internal
