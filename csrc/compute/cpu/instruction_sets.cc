// The table of instruction sets: the name of each, whether this processor has it, and its kernels.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/instruction_sets.h"

#include "base/convert_kernels.h"
#include "compute/cpu/kernel_set.h"

namespace dflash::compute {
namespace {

using namespace dflash::internal;  // what the processor has

bool always() { return true; }
bool has_avx512_vnni_and_bf16() { return has_avx512_vnni() && has_avx512_bf16(); }
bool has_neon_dotprod_and_i8mm() { return has_neon_dotprod() && has_neon_i8mm(); }
// Both extensions belong to Armv8.6, so that a processor with one has the other. This set takes the
// kernels of i8mm for int8 codes.
bool has_neon_i8mm_and_bf16() { return has_neon_dotprod_and_i8mm() && has_neon_bf16(); }

struct InstructionSet {
  const char* name;
  bool (*is_supported)();       // by this processor
  const KernelSet* kernels[3];  // one for each class that it computes, then null
};

// These keep the kernels of the processors that this build is for; other builds have none of them.
#if defined(__x86_64__)
#define DFLASH_OF_X86(...) __VA_ARGS__
#define DFLASH_OF_ARM(...)
#elif defined(__aarch64__)
#define DFLASH_OF_X86(...)
#define DFLASH_OF_ARM(...) __VA_ARGS__
#else
#define DFLASH_OF_X86(...)
#define DFLASH_OF_ARM(...)
#endif

// In the order of Isa.
constexpr InstructionSet kSets[] = {
    {"reference",    always,                    {}                                                                     },
    {"scalar",       always,                    {&kScalarCanonical, &kScalarInt8}                                      },
    {"avx2",         has_avx2_f16c,             {DFLASH_OF_X86(&kAvx2Canonical, &kAvx2Int8)}                           },
    {"avx512",       has_avx512,                {DFLASH_OF_X86(&kAvx512Canonical, &kAvx512Int8)}                       },
    {"neon",         has_neon,                  {DFLASH_OF_ARM(&kNeonCanonical, &kNeonInt8)}                           },
    {"avx512vnni",   has_avx512_vnni,           {DFLASH_OF_X86(&kAvx512Canonical, &kAvx512VnniInt8)}                   },
    {"avx512bf16",
     has_avx512_vnni_and_bf16,                  {DFLASH_OF_X86(&kAvx512Canonical, &kAvx512VnniInt8, &kAvx512Bf16Pairs)}},
    {"neon_dotprod", has_neon_dotprod,          {DFLASH_OF_ARM(&kNeonCanonical, &kNeonDotprodInt8)}                    },
    {"neon_i8mm",    has_neon_dotprod_and_i8mm, {DFLASH_OF_ARM(&kNeonCanonical, &kNeonI8mmInt8)}                       },
    {"neon_bf16",
     has_neon_i8mm_and_bf16,                    {DFLASH_OF_ARM(&kNeonCanonical, &kNeonI8mmInt8, &kNeonBf16Pairs)}      },
};
#undef DFLASH_OF_X86
#undef DFLASH_OF_ARM
static_assert(std::size(kSets) == std::size(kAllIsas));

const InstructionSet& instruction_set(Isa isa) { return kSets[static_cast<uint8_t>(isa)]; }

}  // namespace

const char* isa_name(Isa isa) { return instruction_set(isa).name; }
bool isa_is_supported(Isa isa) { return instruction_set(isa).is_supported(); }

Isa best_isa() {
  Isa best = Isa::kScalar;
  for (Isa isa : kAllIsas) {
    if (isa_is_supported(isa)) best = isa;
  }
  return best;
}

std::string supported_isa_names() {
  std::string names;
  for (Isa isa : kAllIsas) {
    if (isa_is_supported(isa)) names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
  }
  return names;
}

Result<Isa> parse_isa(const std::string& name) {
  for (Isa isa : kAllIsas) {
    if (name == isa_name(isa) && isa_is_supported(isa)) return isa;
  }
  return Error{ErrorCode::kInvalidArgument,
               "CPU kernel set '" + name +
                   "' is not available; this processor has: " + supported_isa_names()};
}

const KernelSet* kernel_set(Isa isa, NumericsClass numerics) {
  for (const KernelSet* kernels : instruction_set(isa).kernels) {
    if (kernels != nullptr && kernels->numerics == numerics) return kernels;
  }
  return nullptr;
}

bool isa_computes(Isa isa, NumericsClass numerics) {
  if (isa == Isa::kReference) return !numerics_facts(numerics).is_bounded();
  return kernel_set(isa, numerics) != nullptr;
}

}  // namespace dflash::compute
