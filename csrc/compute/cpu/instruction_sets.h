// The instruction sets that this project has kernels for, which of them this machine runs, and the
// kernels of each.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "base/result.h"
#include "compute/numerics.h"

namespace dflash::compute {

struct KernelSet;  // kernel_set.h

// Values are internal to a process; names travel.
enum class Isa : uint8_t {
  kReference = 0,  // has no kernels: it is the readable twin of all of them (reference/)
  kScalar = 1,
  kAvx2 = 2,
  kAvx512 = 3,
  kNeon = 4,
  kAvx512Vnni = 5,
  kAvx512Bf16 = 6,
  kNeonDotprod = 7,
  kNeonI8mm = 8,
  kNeonBf16 = 9
};
// Every set of any build. Among those of one processor the best comes last, which best_isa uses.
inline constexpr Isa kAllIsas[] = {Isa::kReference,  Isa::kScalar,    Isa::kNeon, Isa::kNeonDotprod,
                                   Isa::kNeonI8mm,   Isa::kNeonBf16,  Isa::kAvx2, Isa::kAvx512,
                                   Isa::kAvx512Vnni, Isa::kAvx512Bf16};
// One of "reference", "scalar", "neon", "neon_dotprod", "neon_i8mm", "neon_bf16", "avx2", "avx512",
// "avx512vnni" and "avx512bf16".
const char* isa_name(Isa isa);
bool isa_is_supported(Isa isa);  // by this build and by this processor
Isa best_isa();                  // the best supported set
// The names of the sets that this processor has, separated by commas, for messages.
std::string supported_isa_names();
// Errors: kInvalidArgument with the sets that this processor has.
Result<Isa> parse_isa(const std::string& name);

// Null where the set does not compute the class. The reference has no kernels for any.
const KernelSet* kernel_set(Isa isa, NumericsClass numerics);
// Whether the set, or the reference, computes the class with the class's bits.
bool isa_computes(Isa isa, NumericsClass numerics);

}  // namespace dflash::compute
