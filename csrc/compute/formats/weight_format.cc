// The table of weight formats, in the order of the enumeration, and their names.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/weight_format.h"

#include <utility>

namespace dflash::compute {
namespace {

constexpr FormatFacts kFacts[kNumWeightFormats] = {
    {"f32",           1,   4,   0,   0,   0, true,  false},
    {"f16",           1,   2,   0,   0,   0, true,  false},
    {"bf16",          1,   2,   0,   0,   0, true,  false},
    {"int8_g32",      32,  32,  1,   32,  4, false, true },
    {"int4_g32",      32,  16,  1,   32,  4, false, true },
    {"fp8_e4m3_b128", 1,   1,   128, 128, 4, true,  false},
    {"mxfp4",         32,  16,  1,   32,  1, true,  true },
    {"q8_0",          32,  34,  0,   0,   0, true,  true },
    {"q4_0",          32,  18,  0,   0,   0, true,  true },
    {"q4_k",          256, 144, 0,   0,   0, true,  true },
    {"q5_k",          256, 176, 0,   0,   0, true,  true },
    {"q6_k",          256, 210, 0,   0,   0, true,  true },
    {"gguf_mxfp4",    32,  17,  0,   0,   0, true,  true },
    {"iq4_nl",        32,  18,  0,   0,   0, true,  true },
    {"iq4_xs",        256, 136, 0,   0,   0, true,  true },
    {"q4_1",          32,  20,  0,   0,   0, true,  true },
    {"q5_0",          32,  22,  0,   0,   0, true,  true },
    {"q5_1",          32,  24,  0,   0,   0, true,  true },
    {"iq3_xxs",       256, 98,  0,   0,   0, true,  true },
    {"iq3_s",         256, 110, 0,   0,   0, true,  true },
    {"iq2_xxs",       256, 66,  0,   0,   0, true,  true },
    {"iq2_xs",        256, 74,  0,   0,   0, true,  true },
    {"iq2_s",         256, 82,  0,   0,   0, true,  true },
    {"iq1_s",         256, 50,  0,   0,   0, true,  false},
    {"iq1_m",         256, 56,  0,   0,   0, true,  false},
    {"tq1_0",         256, 54,  0,   0,   0, true,  false},
    {"tq2_0",         256, 66,  0,   0,   0, true,  false},
    {"nvfp4",         64,  36,  0,   0,   0, true,  false},
    {"q3_k",          256, 110, 0,   0,   0, true,  true },
    {"q2_k",          256, 84,  0,   0,   0, true,  true },
    {"int4_zp",       32,  20,  0,   0,   0, true,  true },
};

}  // namespace

const FormatFacts& format_facts(WeightFormat format) {
  const auto index = static_cast<uint8_t>(format);
  check(index < kNumWeightFormats, "a weight format exists");
  return kFacts[index];
}

Result<WeightFormat> parse_weight_format(const std::string& name) {
  std::string names;
  for (uint8_t value = 0; value < kNumWeightFormats; ++value) {
    if (name == kFacts[value].name) return static_cast<WeightFormat>(value);
    names += std::string(names.empty() ? "" : ", ") + kFacts[value].name;
  }
  return Error{ErrorCode::kUnsupported,
               "weight format '" + name + "' is not known here; known are " + names};
}

uint64_t row_bytes(WeightFormat format, uint32_t inputs) {
  const FormatFacts& facts = format_facts(format);
  return uint64_t{inputs} / facts.block * facts.block_bytes;
}

Result<WeightsLayout> parse_weights_layout(const std::string& name) {
  if (name == "packed") return WeightsLayout::kPacked;
  if (name == "mapped") return WeightsLayout::kMapped;
  return Error{ErrorCode::kInvalidArgument,
               "weights layout '" + name + "' is not known; allowed are packed and mapped"};
}

Result<ResidentFormats> parse_resident_formats(const std::string& text) {
  const size_t plus = text.find('+');
  auto first = parse_weight_format(text.substr(0, plus));
  if (!first.ok()) return std::move(first).error();
  if (plus == std::string::npos) return ResidentFormats(first.value());
  auto down = parse_weight_format(text.substr(plus + 1));
  if (!down.ok()) return std::move(down).error();
  return ResidentFormats(first.value(), down.value());
}

}  // namespace dflash::compute
