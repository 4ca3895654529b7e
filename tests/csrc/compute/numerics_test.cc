// The table of numerics classes: its numbers, which plug-ins know, and its offers against the
// kernels there are.
// SPDX-License-Identifier: Apache-2.0
#include "compute/numerics.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "twins.h"

namespace dflash::compute {
namespace {

TEST_CASE("classes keep the numbers that plug-ins know them by") {
  const std::vector<std::string> expected = {"f32-canonical", "int8-groups", "bf16-dot",
                                             "bf16-mma",      "bf16-mfma",   "bf16-wmma",
                                             "bf16-bfdot",    "f16-dot2"};
  REQUIRE(numerics_table().size() >= expected.size());
  for (size_t number = 0; number < expected.size(); ++number) {
    CHECK(numerics_table()[number].name == expected[number]);
    CHECK(parse_numerics(expected[number]).value() == static_cast<NumericsClass>(number));
  }
}

TEST_CASE("a kernel set has kernels of exactly the classes that the table offers for it") {
  for (Isa isa : toy::kernel_sets()) {
    for (const NumericsFacts& facts : numerics_table()) {
      CHECK_MESSAGE(
          isa_computes(isa, facts.numerics) == is_offered(facts.kernel_sets(), isa_name(isa)),
          isa_name(isa), ", ", facts.name);
    }
  }
}

TEST_CASE("the reference computes every class but those whose bits are a card's") {
  for (const NumericsFacts& facts : numerics_table())
    CHECK(isa_computes(Isa::kReference, facts.numerics) == !facts.is_bounded());
}

TEST_CASE("an offer covers all, none, one architecture, or one and all later ones") {
  CHECK(is_offered("*", "gfx906"));
  CHECK_FALSE(is_offered("", "gfx906"));
  const char* exact = "gfx908 gfx90a gfx942 simulated";
  for (const char* there : {"gfx908", "gfx90a", "gfx942", "simulated"})
    CHECK(is_offered(exact, there));
  for (const char* other : {"gfx90", "gfx9", "gfx1100", "908", ""})
    CHECK_FALSE(is_offered(exact, other));
  const char* later = "sm_80+ simulated";
  for (const char* there : {"sm_80", "sm_86", "sm_90", "sm_120", "simulated"})
    CHECK(is_offered(later, there));
  for (const char* other : {"sm_75", "sm_8", "gfx908", "80", ""})
    CHECK_FALSE(is_offered(later, other));
}

TEST_CASE("a class names the formats that it takes when it refuses one") {
  const Status refused = check_numerics(NumericsClass::kInt8Groups, WeightFormat::kBF16);
  REQUIRE_FALSE(refused.ok());
  CHECK(refused.error().message ==
        "numerics class int8-groups does not take weights in bf16; it takes int8_g32, int4_g32, "
        "mxfp4, q8_0, q4_0, q4_k, q5_k, q6_k, gguf_mxfp4, iq4_nl, iq4_xs, q4_1, q5_0, "
        "q5_1, iq3_xxs, iq3_s, iq2_xxs, iq2_xs, iq2_s, q3_k, q2_k, int4_zp");
  CHECK(check_numerics(NumericsClass::kBf16Dot, WeightFormat::kBF16).ok());
  CHECK_FALSE(
      check_numerics(NumericsClass::kBf16Dot, {WeightFormat::kBF16, WeightFormat::kF16}).ok());
  for (uint8_t format = 0; format < kNumWeightFormats; ++format)
    CHECK(numerics_facts(NumericsClass::kBf16Mma).takes(static_cast<WeightFormat>(format)));
}

}  // namespace
}  // namespace dflash::compute
