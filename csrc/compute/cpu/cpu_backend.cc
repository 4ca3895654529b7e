// Choice of an instruction set, and the backend that ties kernels and threads together.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/cpu_backend.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/convert_kernels.h"
#include "compute/cpu/cpu_layer.h"
#include "compute/reference/reference.h"

namespace dflash::compute {
namespace {

// Longer than the gap between the two phases of a decode step, shorter than a scheduler tick.
constexpr int64_t kSpinNs = 20'000;

const KernelSet& canonical_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kAvx2Kernels;
  if (isa == Isa::kAvx512 || isa == Isa::kAvx512Vnni || isa == Isa::kAvx512Bf16)
    return kAvx512Kernels;
#elif defined(__aarch64__)
  if (isa == Isa::kNeon || isa == Isa::kNeonDotprod || isa == Isa::kNeonI8mm ||
      isa == Isa::kNeonBf16)
    return kNeonKernels;
#endif
  static_cast<void>(isa);
  return kScalarKernels;
}

// Of the class of this kind of processor, bf16-dot or bf16-bfdot.
const KernelSet* bf16_kernels(Isa isa, NumericsClass numerics) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512Bf16 && numerics == NumericsClass::kBf16Dot) return &kAvx512Bf16Kernels;
#elif defined(__aarch64__)
  if (isa == Isa::kNeonBf16 && numerics == NumericsClass::kBf16Bfdot) return &kNeonBf16Kernels;
#endif
  static_cast<void>(isa);
  static_cast<void>(numerics);
  return nullptr;
}

const KernelSet& int8_kernels(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx2) return kInt8Avx2Kernels;
  if (isa == Isa::kAvx512) return kInt8Avx512Kernels;
  if (isa == Isa::kAvx512Vnni || isa == Isa::kAvx512Bf16) return kInt8Avx512VnniKernels;
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) return kInt8NeonKernels;
  if (isa == Isa::kNeonDotprod) return kInt8NeonDotprodKernels;
  if (isa == Isa::kNeonI8mm || isa == Isa::kNeonBf16) return kInt8NeonI8mmKernels;
#endif
  static_cast<void>(isa);
  return kInt8ScalarKernels;
}

// Spinning is paid for by a core that nothing else needs: one more than the compute threads must be
// usable (the poller's).
int64_t default_spin_ns(uint32_t num_threads) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return 0;
  return static_cast<uint32_t>(CPU_COUNT(&usable)) > num_threads ? kSpinNs : 0;
}

std::string supported_names() {
  std::string names;
  for (Isa isa : kAllIsas) {
    if (isa_is_supported(isa)) names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
  }
  return names;
}

}  // namespace

const KernelSet* kernel_set(Isa isa, NumericsClass numerics) {
  switch (numerics) {
    case NumericsClass::kF32Canonical: return &canonical_kernels(isa);
    case NumericsClass::kBf16Dot:
    case NumericsClass::kBf16Bfdot:    return bf16_kernels(isa, numerics);
    case NumericsClass::kInt8Groups:   return &int8_kernels(isa);
    case NumericsClass::kBf16Mma:
    case NumericsClass::kBf16Mfma:
    case NumericsClass::kBf16Wmma:
    case NumericsClass::kF16Dot2:      return nullptr;  // of cards
  }
  return nullptr;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kReference:   return "reference";
    case Isa::kScalar:      return "scalar";
    case Isa::kAvx2:        return "avx2";
    case Isa::kAvx512:      return "avx512";
    case Isa::kNeon:        return "neon";
    case Isa::kAvx512Vnni:  return "avx512vnni";
    case Isa::kAvx512Bf16:  return "avx512bf16";
    case Isa::kNeonDotprod: return "neon_dotprod";
    case Isa::kNeonI8mm:    return "neon_i8mm";
    case Isa::kNeonBf16:    return "neon_bf16";
  }
  return "unknown";
}

bool isa_is_supported(Isa isa) {
  switch (isa) {
    case Isa::kReference:
    case Isa::kScalar:      return true;
    case Isa::kAvx2:        return internal::has_avx2_f16c();
    case Isa::kAvx512:      return internal::has_avx512();
    case Isa::kNeon:        return internal::has_neon();
    case Isa::kAvx512Vnni:  return internal::has_avx512_vnni();
    case Isa::kAvx512Bf16:  return internal::has_avx512_vnni() && internal::has_avx512_bf16();
    case Isa::kNeonDotprod: return internal::has_neon_dotprod();
    case Isa::kNeonI8mm:    return internal::has_neon_dotprod() && internal::has_neon_i8mm();
    // Both of Armv8.6: processors that have one have the other, and int8-groups takes the kernels
    // of neon_i8mm.
    case Isa::kNeonBf16:
      return internal::has_neon_dotprod() && internal::has_neon_i8mm() && internal::has_neon_bf16();
  }
  return false;
}

Isa best_isa() {
  Isa best = Isa::kScalar;
  for (Isa isa : kAllIsas) {
    if (isa_is_supported(isa)) best = isa;
  }
  return best;
}

Result<Isa> parse_isa(const std::string& name) {
  for (Isa isa : kAllIsas) {
    if (name == isa_name(isa) && isa_is_supported(isa)) return isa;
  }
  return Error{
      ErrorCode::kInvalidArgument,
      "CPU kernel set '" + name + "' is not available; this processor has: " + supported_names()};
}

struct CpuBackend::State {
  Isa isa;
  std::unique_ptr<ThreadPool> pool;
  WeightsLayout layout;
};

CpuBackend::CpuBackend() = default;
CpuBackend::~CpuBackend() = default;
Isa CpuBackend::isa() const { return state_->isa; }
uint32_t CpuBackend::num_threads() const { return state_->pool->num_threads(); }

Result<std::unique_ptr<CpuBackend>> CpuBackend::create(Isa isa, uint32_t num_threads,
                                                       std::vector<int> cpus,
                                                       WeightsLayout layout) {
  if (!isa_is_supported(isa)) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string("CPU kernel set '") + isa_name(isa) +
                     "' is not available; this processor has: " + supported_names()};
  }
  auto pool = ThreadPool::create(num_threads, cpus, default_spin_ns(num_threads));
  if (!pool.ok()) return std::move(pool).error();
  std::unique_ptr<CpuBackend> backend(new CpuBackend());
  backend->state_ = std::make_unique<State>(State{isa, std::move(pool).value(), layout});
  return backend;
}

std::vector<NumericsClass> CpuBackend::numerics_classes(Isa isa) {
  std::vector<NumericsClass> found;
  for (NumericsClass numerics : kAllNumericsClasses) {
    if (is_bounded_class(numerics)) continue;  // of cards; the reference is only near them
    if (isa == Isa::kReference ? reference_computes(numerics)
                               : kernel_set(isa, numerics) != nullptr)
      found.push_back(numerics);
  }
  return found;
}

Result<std::unique_ptr<ExpertLayer>> CpuBackend::create_layer(const FfnSpec& spec,
                                                              uint32_t num_local_experts,
                                                              ResidentFormats formats,
                                                              NumericsClass numerics) {
  DFLASH_TRY(spec.validate());
  DFLASH_TRY(check_numerics(numerics, formats));
  const std::vector<NumericsClass> classes = numerics_classes(state_->isa);
  if (std::find(classes.begin(), classes.end(), numerics) == classes.end()) {
    return Error{ErrorCode::kUnsupported, std::string("CPU kernel set '") + isa_name(state_->isa) +
                                              "' does not compute numerics class " +
                                              numerics_name(numerics)};
  }
  if (num_local_experts < 1 || num_local_experts > 65535) {
    return Error{ErrorCode::kUnsupported, "a layer has " + std::to_string(num_local_experts) +
                                              " local experts; supported: 1..65535"};
  }
  if (state_->isa == Isa::kReference)
    return make_reference_layer(spec, num_local_experts, formats, numerics);
  const KernelSet& kernels = *kernel_set(state_->isa, numerics);
  auto experts = PackedExperts::create(spec, num_local_experts, formats, kernels, state_->layout);
  if (!experts.ok()) return std::move(experts).error();
  return std::unique_ptr<ExpertLayer>(
      std::make_unique<CpuLayer>(spec, std::move(experts).value(), kernels, *state_->pool));
}

Result<uint64_t> CpuBackend::predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                             ResidentFormats formats, NumericsClass) const {
  // Mapped weights stay in the files; the reference copies them all the same.
  if (state_->layout == WeightsLayout::kMapped && state_->isa != Isa::kReference)
    return uint64_t{0};
  return predicted_bytes(state_->isa, spec, num_local_experts, formats);
}

uint64_t CpuBackend::predicted_bytes(Isa isa, const FfnSpec& spec, uint32_t num_local_experts,
                                     ResidentFormats formats) {
  if (isa == Isa::kReference) formats = WeightFormat::kF32;  // it keeps float32 copies
  return PackedExperts::predicted_bytes(spec, num_local_experts, formats,
                                        canonical_kernels(isa).panel_width);
}

}  // namespace dflash::compute
