// Kernel sets by name and by processor: which there are, and which is taken where none is asked
// for.
// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "compute/cpu/cpu_backend.h"
#include "failed.h"

namespace dflash::compute {
namespace {

TEST_CASE("every kernel set has a name of its own, and its name where the processor has it") {
  std::set<std::string> names;
  for (Isa isa : kAllIsas) {
    names.insert(isa_name(isa));
    const auto parsed = parse_isa(isa_name(isa));
    CHECK(parsed.ok() == isa_is_supported(isa));
    if (parsed.ok())
      CHECK(parsed.value() == isa);
    else
      CHECK(parsed.error().message == Has{std::string("'") + isa_name(isa) + "' is not available"});
  }
  CHECK(names.size() == std::size(kAllIsas));
}

TEST_CASE(
    "the best kernel set is the last that the processor has, and has every set of its processor "
    "below it") {
  const Isa best = best_isa();
  CHECK(isa_is_supported(best));
  bool is_behind = false;
  for (Isa isa : kAllIsas) {
    if (is_behind) CHECK_FALSE(isa_is_supported(isa));
    is_behind = is_behind || isa == best;
  }
  // set where the emulated processor is known (.ci/neon)
  const char* expected = std::getenv("DFLASH_TEST_BEST_ISA");
  if (expected != nullptr) CHECK(isa_name(best) == std::string(expected));
}

}  // namespace
}  // namespace dflash::compute
