// Peaks by kernel set: which there are.
// SPDX-License-Identifier: Apache-2.0
#include "measure/peaks.h"
#include "failed.h"

#include <doctest/doctest.h>

#include <string>
#include <vector>

namespace dflash::measure {
namespace {

using compute::Isa;

TEST_CASE(
    "peaks of bytes' and bf16's products are measured where a set has an instruction for them, and "
    "refused by name elsewhere") {
  const auto check = [](const Result<std::vector<double>>& found, bool is_there,
                        const char* refusal) {
    CHECK(found.ok() == is_there);
    if (found.ok())
      CHECK(found.value().at(0) > 0);
    else
      CHECK(found.error().message == Has{refusal});
  };
  for (Isa isa : compute::kAllIsas) {
    if (!compute::isa_is_supported(isa)) continue;
    CAPTURE(compute::isa_name(isa));
    const bool is_plain = isa == Isa::kReference || isa == Isa::kScalar || isa == Isa::kNeon;
    check(integer_multiply_add_per_s(isa, 1, 1, 0.01), !is_plain, "has no integer multiply-add");
    check(bf16_multiply_add_per_s(isa, 1, 1, 0.01),
          isa == Isa::kAvx512Bf16 || isa == Isa::kNeonBf16, "has no bf16 multiply-add");
  }
}

}  // namespace
}  // namespace dflash::measure
