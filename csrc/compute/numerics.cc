// SPDX-License-Identifier: Apache-2.0
#include "compute/numerics.h"

namespace dflash::compute {
namespace {

std::string formats_taken(NumericsClass numerics) {
  std::string names;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (numerics_take(numerics, format))
      names += std::string(names.empty() ? "" : ", ") + format_name(format);
  }
  return names;
}

}  // namespace

const char* numerics_name(NumericsClass numerics) {
  switch (numerics) {
    case NumericsClass::kF32Canonical: return "f32-canonical";
    case NumericsClass::kInt8Groups:   return "int8-groups";
    case NumericsClass::kBf16Dot:      return "bf16-dot";
    case NumericsClass::kBf16Mma:      return "bf16-mma";
    case NumericsClass::kBf16Mfma:     return "bf16-mfma";
    case NumericsClass::kBf16Wmma:     return "bf16-wmma";
    case NumericsClass::kBf16Bfdot:    return "bf16-bfdot";
    case NumericsClass::kF16Dot2:      return "f16-dot2";
  }
  return "unknown";
}

Result<NumericsClass> parse_numerics(const std::string& name) {
  std::string names;
  for (NumericsClass numerics : kAllNumericsClasses) {
    if (name == numerics_name(numerics)) return numerics;
    names += std::string(names.empty() ? "" : ", ") + numerics_name(numerics);
  }
  return Error{ErrorCode::kUnsupported,
               "numerics class '" + name + "' is not known here; known are " + names};
}

bool numerics_take(NumericsClass numerics, WeightFormat format) {
  switch (numerics) {
    case NumericsClass::kF32Canonical: return true;
    // Weights that are a small integer times a scale per at most 32 inputs, and an offset per 32 at
    // most.
    case NumericsClass::kInt8Groups:
      return !is_float(format) && format != WeightFormat::kFp8E4m3B128;
    case NumericsClass::kBf16Dot:
    case NumericsClass::kBf16Bfdot: return format == WeightFormat::kBF16;
    case NumericsClass::kBf16Mma:
    case NumericsClass::kBf16Mfma:
    case NumericsClass::kBf16Wmma:
    case NumericsClass::kF16Dot2:   return true;
  }
  return false;
}

Status check_numerics(NumericsClass numerics, ResidentFormats formats) {
  for (WeightFormat format : {formats.gate_up, formats.down}) {
    if (numerics_take(numerics, format)) continue;
    return Error{ErrorCode::kUnsupported, std::string("numerics class ") + numerics_name(numerics) +
                                              " does not take weights in " + format_name(format) +
                                              "; it takes " + formats_taken(numerics)};
  }
  return ok();
}

}  // namespace dflash::compute
