// Numerics classes: what arithmetic turns a row into a reply. Within a class the bits are a
// function of rows, weights and routing alone; two classes are near each other, never equal. The
// class of a layer is fixed when its weights load (docs/architecture.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "compute/weight_format.h"

namespace dflash::compute {

// Values are internal: names travel.
enum class NumericsClass : uint8_t {
  kF32Canonical = 0,  // float32 activations, one fma chain per output and 256 inputs
  // int8 activations: codes round(x / scale) with scale = amax / 127 per row and 32 inputs; exact
  // integer sums within a group, one fma per group with the product of both scales, groups
  // ascending in blocks of 256 inputs
  kInt8Groups = 1,
  kBf16Dot = 2,  // bf16 activations and weights, the pair-wise dot product of AVX512-BF16
  // bf16 activations and weights (of any format, rounded to bf16) on a card's matrix units, float32
  // sums of 256 inputs each: a class per instruction family, since how one adds its products is the
  // vendor's (docs/decisions/0015)
  kBf16Mma = 3,   // NVIDIA mma.sync
  kBf16Mfma = 4,  // AMD MFMA
  kBf16Wmma = 5,  // AMD WMMA
  // bf16 activations and weights, the pair-wise dot product of AArch64's BF16 extension
  kBf16Bfdot = 6,
  // f16 activations and weights with a scale per row, or output, and 32 inputs; dot products of
  // pairs on AMD's cards, which add them as they will; one fma per group as in int8-groups
  // (docs/decisions/0019)
  kF16Dot2 = 7,
};
inline constexpr NumericsClass kAllNumericsClasses[] = {
    NumericsClass::kF32Canonical, NumericsClass::kInt8Groups, NumericsClass::kBf16Dot,
    NumericsClass::kBf16Mma,      NumericsClass::kBf16Mfma,   NumericsClass::kBf16Wmma,
    NumericsClass::kBf16Bfdot,    NumericsClass::kF16Dot2};

// "f32-canonical" "int8-groups" "bf16-dot" "bf16-mma" "bf16-mfma" "bf16-wmma" "bf16-bfdot"
// "f16-dot2"
const char* numerics_name(NumericsClass numerics);
// Whether the class is one of matrix units, whose kernels multiply rows of bf16.
constexpr bool is_matrix_class(NumericsClass numerics) {
  return numerics == NumericsClass::kBf16Mma || numerics == NumericsClass::kBf16Mfma ||
         numerics == NumericsClass::kBf16Wmma;
}
// Whether the class's bits are a card's: the reference is within a derived bound of them, and no
// processor offers it.
constexpr bool is_bounded_class(NumericsClass numerics) {
  return is_matrix_class(numerics) || numerics == NumericsClass::kF16Dot2;
}
// Errors: kUnsupported naming the classes there are.
Result<NumericsClass> parse_numerics(const std::string& name);

// Whether the class computes with weights of this format.
bool numerics_take(NumericsClass numerics, WeightFormat format);
// Errors: kUnsupported naming class and format, and the formats the class takes.
Status check_numerics(NumericsClass numerics, ResidentFormats formats);

}  // namespace dflash::compute
