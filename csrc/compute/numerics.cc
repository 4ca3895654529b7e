// The one table of numerics classes (numerics.h). tests/checks/numerics_names.py checks that no
// other product code names a class.
// SPDX-License-Identifier: Apache-2.0
#include "compute/numerics.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace dflash::compute {
namespace {

// Inputs that share a scale in the classes that have groups.
constexpr uint32_t kGroup = 32;
constexpr Offers kEverybody = {"*", "*", "*", "*"};

// The simulator stands for cards of both vendors; its architecture is "simulated".
// clang-format off: a row per class, its offers (x86_64, aarch64, cuda, hip) below it.
constexpr NumericsFacts kTable[] = {
    {NumericsClass::kF32Canonical, "f32-canonical", "f32", InputRounding::kNone, 0, WeightRounding::kNone,
     FormatsTaken::kAll, Bits::kReference, kEverybody},
    {NumericsClass::kInt8Groups, "int8-groups", "int8", InputRounding::kInt8, kGroup, WeightRounding::kNone,
     FormatsTaken::kIntegerCodes, Bits::kReference, kEverybody},
    {NumericsClass::kBf16Dot, "bf16-dot", "bf16", InputRounding::kBf16, 0, WeightRounding::kNone,
     FormatsTaken::kBf16, Bits::kReference,
     {"avx512bf16", "", "", ""}},
    {NumericsClass::kBf16Mma, "bf16-mma", "bf16", InputRounding::kBf16, 0, WeightRounding::kBf16,
     FormatsTaken::kAll, Bits::kArchitecture,
     {"", "", "sm_80+ simulated", ""}},
    {NumericsClass::kBf16Mfma, "bf16-mfma", "bf16", InputRounding::kBf16, 0, WeightRounding::kBf16,
     FormatsTaken::kAll, Bits::kArchitecture,
     {"", "", "", "gfx908 gfx90a gfx942 simulated"}},
    {NumericsClass::kBf16Wmma, "bf16-wmma", "bf16", InputRounding::kBf16, 0, WeightRounding::kBf16,
     FormatsTaken::kAll, Bits::kArchitecture,
     {"", "", "", "gfx1100 gfx1201"}},
    {NumericsClass::kBf16Bfdot, "bf16-bfdot", "bf16", InputRounding::kBf16, 0, WeightRounding::kNone,
     FormatsTaken::kBf16, Bits::kReference,
     {"", "neon_bf16", "", ""}},
    {NumericsClass::kF16Dot2, "f16-dot2", "f16", InputRounding::kF16, kGroup, WeightRounding::kF16,
     FormatsTaken::kAll, Bits::kArchitecture,
     {"", "", "", "gfx906 gfx908 gfx90a gfx942 gfx1030 gfx1100 gfx1201 simulated"}},
};
// clang-format on

constexpr bool is_in_order() {
  size_t row = 0;
  for (const NumericsFacts& facts : kTable) {
    if (static_cast<size_t>(facts.numerics) != row++) return false;
  }
  return true;
}
static_assert(is_in_order());

// Whether an offer covers a name. "sm_80+" covers "sm_80", "sm_90" and "sm_120": names with the
// same letters and a number that is not smaller.
bool covers(std::string_view offered, std::string_view name) {
  if (!offered.ends_with('+')) return offered == name;
  const size_t digits = offered.find_first_of("0123456789");
  if (name.substr(0, digits) != offered.substr(0, digits)) return false;
  const auto number = [digits](std::string_view text) {
    return std::atoi(std::string(text.substr(digits)).c_str());
  };
  return number(name) >= number(offered);
}

std::string formats_taken(const NumericsFacts& facts) {
  std::string names;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    const auto format = static_cast<WeightFormat>(value);
    if (facts.takes(format)) names += std::string(names.empty() ? "" : ", ") + format_name(format);
  }
  return names;
}

}  // namespace

std::span<const NumericsFacts> numerics_table() { return kTable; }

const NumericsFacts& numerics_facts(NumericsClass numerics) {
  check(static_cast<size_t>(numerics) < std::size(kTable), "a numerics class exists");
  return kTable[static_cast<size_t>(numerics)];
}

bool NumericsFacts::takes(WeightFormat format) const {
  switch (formats) {
    case FormatsTaken::kAll:          return true;
    case FormatsTaken::kBf16:         return format == WeightFormat::kBF16;
    case FormatsTaken::kIntegerCodes: return format_facts(format).has_integer_codes;
  }
  return false;
}

const char* NumericsFacts::kernel_sets() const {
#if defined(__x86_64__)
  return offers.x86_64;
#elif defined(__aarch64__)
  return offers.aarch64;
#else
  return std::string_view(offers.x86_64) == "*" ? "*" : "";
#endif
}

bool is_offered(const char* offered, const std::string& name) {
  std::string_view left = offered;
  if (left == "*") return true;
  while (!left.empty()) {
    const size_t end = std::min(left.find(' '), left.size());
    if (covers(left.substr(0, end), name)) return true;
    left.remove_prefix(std::min(end + 1, left.size()));
  }
  return false;
}

Result<NumericsClass> parse_numerics(const std::string& name) {
  std::string names;
  for (const NumericsFacts& facts : kTable) {
    if (name == facts.name) return facts.numerics;
    names += std::string(names.empty() ? "" : ", ") + facts.name;
  }
  return Error{ErrorCode::kUnsupported,
               "numerics class '" + name + "' is not known here; known are " + names};
}

Status check_numerics(NumericsClass numerics, ResidentFormats formats) {
  const NumericsFacts& facts = numerics_facts(numerics);
  for (WeightFormat format : {formats.gate_up, formats.down}) {
    if (facts.takes(format)) continue;
    return Error{ErrorCode::kUnsupported, std::string("numerics class ") + facts.name +
                                              " does not take weights in " + format_name(format) +
                                              "; it takes " + formats_taken(facts)};
  }
  return ok();
}

}  // namespace dflash::compute
