// Creates the layers of the CPU backend and predicts their memory.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/cpu_backend.h"

#include <sched.h>

#include <utility>

#include "compute/cpu/cpu_layer.h"
#include "compute/reference/reference.h"

namespace dflash::compute {
namespace {

// How long an idle thread spins before it sleeps: longer than the gap between the two phases of a
// decode step, shorter than a tick of the scheduler.
constexpr int64_t kSpinNs = 20'000;

// Spinning only pays on a core that nothing else needs. Threads therefore spin where at least one
// more CPU is usable than there are compute threads, which leaves one to the poller.
int64_t default_spin_ns(uint32_t num_threads) {
  cpu_set_t usable;
  CPU_ZERO(&usable);
  if (sched_getaffinity(0, sizeof(usable), &usable) != 0) return 0;
  return static_cast<uint32_t>(CPU_COUNT(&usable)) > num_threads ? kSpinNs : 0;
}

}  // namespace

struct CpuBackend::State {
  Isa isa;
  std::shared_ptr<ThreadPool> pool;
  WeightsLayout layout;
  ScratchPool<ForwardScratch> scratch{};
};

CpuBackend::CpuBackend() = default;
CpuBackend::~CpuBackend() = default;
Isa CpuBackend::isa() const { return state_->isa; }
uint32_t CpuBackend::num_threads() const { return state_->pool->num_threads(); }

Result<std::unique_ptr<CpuBackend>> CpuBackend::create(Isa isa, uint32_t num_threads,
                                                       std::vector<int> cpus,
                                                       WeightsLayout layout) {
  auto pool = ThreadPool::create(num_threads, cpus, default_spin_ns(num_threads));
  if (!pool.ok()) return std::move(pool).error();
  return create(isa, std::move(pool).value(), layout);
}

Result<std::unique_ptr<CpuBackend>> CpuBackend::create(Isa isa, std::shared_ptr<ThreadPool> pool,
                                                       WeightsLayout layout) {
  if (!isa_is_supported(isa)) {
    return Error{ErrorCode::kInvalidArgument,
                 std::string("CPU kernel set '") + isa_name(isa) +
                     "' is not available; this processor has: " + supported_isa_names()};
  }
  std::unique_ptr<CpuBackend> backend(new CpuBackend());
  backend->state_ = std::make_unique<State>(isa, std::move(pool), layout);
  return backend;
}

std::vector<NumericsClass> CpuBackend::numerics_classes(Isa isa) {
  std::vector<NumericsClass> found;
  for (const NumericsFacts& facts : numerics_table()) {
    if (isa_computes(isa, facts.numerics)) found.push_back(facts.numerics);
  }
  return found;
}

Result<std::unique_ptr<ExpertLayer>> CpuBackend::create_layer(const FfnSpec& spec,
                                                              uint32_t num_local_experts,
                                                              ResidentFormats formats,
                                                              NumericsClass numerics) {
  DFLASH_TRY(spec.validate());
  DFLASH_TRY(check_numerics(numerics, formats));
  if (!isa_computes(state_->isa, numerics)) {
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
  return std::unique_ptr<ExpertLayer>(std::make_unique<CpuLayer>(
      spec, std::move(experts).value(), kernels, *state_->pool, state_->scratch));
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
  if (isa == Isa::kReference) {  // it keeps float32 copies, which take what scalar panels take
    formats = WeightFormat::kF32;
    isa = Isa::kScalar;
  }
  return PackedExperts::predicted_bytes(spec, num_local_experts, formats,
                                        kernel_set(isa, kDefaultNumerics)->panel_width);
}

}  // namespace dflash::compute
