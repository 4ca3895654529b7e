// Numerics classes: which arithmetic turns a row into a reply. Within a class the bits are a
// function of the row, the weights and the routing alone; two classes are near each other, never
// equal. The class of a layer is fixed when its weights load.
//
// The table in numerics.cc is all that anybody has to know about a class, in C++ and in Python: a
// new class is a row there, and its kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute {

// Rows of the table. Names travel between host and worker; the values travel to plug-ins
// (plugin/backend_abi.h), so that a new class takes the next one.
enum class NumericsClass : uint8_t {
  // One fma chain per output and 256 inputs, on float32 inputs and weights.
  kF32Canonical = 0,
  // Exact integer sums over groups of inputs, then one fma per group with the product of both
  // scales, groups ascending in blocks of 256 inputs.
  kInt8Groups = 1,
  kBf16Dot = 2,  // the pair-wise dot product of x86's AVX512-BF16
  // Matrix units of cards, float32 sums of 256 inputs each: a class per family of instructions,
  // since how one adds its products is its vendor's own (docs/decisions/0015).
  kBf16Mma = 3,    // NVIDIA mma.sync
  kBf16Mfma = 4,   // AMD MFMA
  kBf16Wmma = 5,   // AMD WMMA
  kBf16Bfdot = 6,  // the pair-wise dot product of AArch64's BF16 extension
  // Dot products of pairs on AMD's cards, which add them as they will; one fma per group as in
  // kInt8Groups (docs/decisions/0019).
  kF16Dot2 = 7,
};
inline constexpr NumericsClass kDefaultNumerics = NumericsClass::kF32Canonical;

// What becomes of a row's inputs before they meet the weights.
enum class InputRounding : uint8_t {
  kNone,
  kBf16,  // the nearest bf16
  kInt8,  // codes of -127..127 and a scale per group of inputs: its largest magnitude / 127
  kF16,   // f16 and a power of two per group of inputs
};

// What becomes of the weights, beyond what their format says.
enum class WeightRounding : uint8_t {
  kNone,  // they are the float32 values of their format (dequantize.h), or its integers
  kBf16,  // the nearest bf16
  kF16,   // f16 and a power of two per group: exact, but for formats of more than 11 bits (f32)
};

enum class FormatsTaken : uint8_t {
  kAll,
  kBf16,
  kIntegerCodes,  // those with small integers as codes (FormatFacts)
};

// Whose bits the class has.
enum class Bits : uint8_t {
  kReference,  // the reference's, whoever computes
  // Those of a card's instruction: equal on cards of one architecture, and anywhere within a bound
  // around the reference that is derived (reference/class_bounds.h).
  kArchitecture,
};

// Kernel sets of processors and architectures of cards that compute a class, separated by spaces.
// "*": all of them; "": none; "sm_80+": this one and all later ones.
struct Offers {
  const char* x86_64;
  const char* aarch64;
  const char* cuda;
  const char* hip;
};

struct NumericsFacts {
  NumericsClass numerics;
  const char* name;
  // How a topology asks for the class, `activations`; where several answer to it, the machine
  // decides.
  const char* activations;
  InputRounding inputs;
  uint32_t group_inputs;  // inputs of a row that share a scale; 0: none do
  WeightRounding weights;
  FormatsTaken formats;
  Bits bits;
  Offers offers;

  bool takes(WeightFormat format) const;
  bool is_bounded() const { return bits == Bits::kArchitecture; }
  // What processors of this build's kind offer; empty where no kernel set computes the class.
  const char* kernel_sets() const;
};

// In the order of the enumeration.
std::span<const NumericsFacts> numerics_table();
const NumericsFacts& numerics_facts(NumericsClass numerics);
inline const char* numerics_name(NumericsClass numerics) { return numerics_facts(numerics).name; }
// Errors: kUnsupported naming the classes there are.
Result<NumericsClass> parse_numerics(const std::string& name);

// Whether `name`, a kernel set or an architecture, is among `offered`, a field of Offers.
bool is_offered(const char* offered, const std::string& name);

// Errors: kUnsupported naming class and format, and the formats that the class takes.
Status check_numerics(NumericsClass numerics, ResidentFormats formats);

}  // namespace dflash::compute
