// Numerics classes: which arithmetic turns a row into a reply. Within a class the bits depend on
// the row, the weights and the routing alone; two classes are near each other, never equal. The
// class of a layer is fixed when its weights load.
//
// The table in numerics.cc is all that C++ and Python know about a class. A new class is a row
// there and its kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/result.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute {

// Rows of the table. Names travel between host and worker, and the values travel to plug-ins
// (plugin/backend_abi.h), so that a new class takes the next value.
enum class NumericsClass : uint8_t {
  // A chain of fmas per output and 256 inputs, on float32 inputs and weights.
  kF32Canonical = 0,
  // Exact integer sums over groups of inputs, then one fma per group with the product of both
  // scales; groups ascend in blocks of 256 inputs.
  kInt8Groups = 1,
  kBf16Dot = 2,  // the pair-wise dot product of x86's AVX512-BF16
  // Matrix units of cards, with float32 sums of 256 inputs each. Each family of instructions is a
  // class, because how one adds its products is its vendor's own (docs/decisions/0015).
  kBf16Mma = 3,    // NVIDIA mma.sync
  kBf16Mfma = 4,   // AMD MFMA
  kBf16Wmma = 5,   // AMD WMMA
  kBf16Bfdot = 6,  // the pair-wise dot product of AArch64's BF16 extension
  // Dot products of pairs on AMD's cards, each of which adds them in its own way, then one fma per
  // group as in kInt8Groups (docs/decisions/0019).
  kF16Dot2 = 7,
};
inline constexpr NumericsClass kDefaultNumerics = NumericsClass::kF32Canonical;

// How a row's inputs are rounded before they meet the weights.
enum class InputRounding : uint8_t {
  kNone,
  kBf16,  // the nearest bf16
  kInt8,  // codes -127..127 with a scale per group of inputs, its largest magnitude / 127
  kF16,   // f16 codes with a power of two per group of inputs
};

// How the weights are rounded, beyond what their format does.
enum class WeightRounding : uint8_t {
  kNone,  // they are the float32 values of their format (dequantize.h), or its integers
  kBf16,  // the nearest bf16
  kF16,   // f16 and a power of two per group, which is exact for formats of at most 11 bits
};

// Which resident formats a class takes.
enum class FormatsTaken : uint8_t {
  kAll,
  kBf16,
  kIntegerCodes,  // those whose codes are small integers (FormatFacts::has_integer_codes)
};

// What decides the bits of a class.
enum class Bits : uint8_t {
  kReference,  // they are the reference's, whoever computes
  // They are those of a card's instruction: equal on cards of one architecture, and on any card
  // within a derived bound around the reference (reference/reference.h).
  kArchitecture,
};

// The kernel sets of processors and the architectures of cards that compute a class, separated by
// spaces. "*" stands for all of them, "" for none, and "sm_80+" for that one and all later ones.
struct Offers {
  const char* x86_64;
  const char* aarch64;
  const char* cuda;
  const char* hip;
};

// One row of the table.
struct NumericsFacts {
  NumericsClass numerics;
  const char* name;
  // What a topology's `activations` says to ask for the class. Where several classes have the same
  // word, the machine decides.
  const char* activations;
  InputRounding inputs;
  uint32_t group_inputs;  // inputs of a row that share a scale; 0 where none do
  WeightRounding weights;
  FormatsTaken formats;
  Bits bits;
  Offers offers;

  bool takes(WeightFormat format) const;
  bool is_bounded() const { return bits == Bits::kArchitecture; }
  // The kernel sets offered by processors of this build's kind; empty where none computes the
  // class.
  const char* kernel_sets() const;
};

// All classes, in the order of the enumeration.
std::span<const NumericsFacts> numerics_table();
const NumericsFacts& numerics_facts(NumericsClass numerics);
inline const char* numerics_name(NumericsClass numerics) { return numerics_facts(numerics).name; }
// Errors: kUnsupported naming the classes that exist.
Result<NumericsClass> parse_numerics(const std::string& name);

// Whether `name`, a kernel set or an architecture, is among `offered`, a field of Offers.
bool is_offered(const char* offered, const std::string& name);

// Checks that the class takes both formats. Errors: kUnsupported naming the class, the format and
// the formats that the class takes.
Status check_numerics(NumericsClass numerics, ResidentFormats formats);

}  // namespace dflash::compute
