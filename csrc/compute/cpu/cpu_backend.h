// The CPU backend: kernels per instruction set, chosen at construction, and the worker's thread
// pool.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "compute/expert_backend.h"

namespace dflash::compute {

// Instruction sets this build has kernels for. Values are internal.
enum class Isa : uint8_t {
  kReference = 0,
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
// Every set of any build, best last among those of one processor.
inline constexpr Isa kAllIsas[] = {Isa::kReference,  Isa::kScalar,    Isa::kNeon, Isa::kNeonDotprod,
                                   Isa::kNeonI8mm,   Isa::kNeonBf16,  Isa::kAvx2, Isa::kAvx512,
                                   Isa::kAvx512Vnni, Isa::kAvx512Bf16};
// "reference" "scalar" "neon" "neon_dotprod" "neon_i8mm" "neon_bf16" "avx2" "avx512" "avx512vnni"
// "avx512bf16"
const char* isa_name(Isa isa);
bool isa_is_supported(Isa isa);  // by this build and this processor
Isa best_isa();
// Errors: kInvalidArgument listing the sets this processor supports.
Result<Isa> parse_isa(const std::string& name);

class ThreadPool;  // thread_pool.h
struct KernelSet;  // kernel_set.h
// Null: this instruction set does not compute the class.
const KernelSet* kernel_set(Isa isa, NumericsClass numerics);

class CpuBackend final : public ExpertBackend {
 public:
  // num_threads >= 1, the calling thread counted; pool threads are pinned to `cpus` when given (one
  // each, after the caller's). With layout `mapped`, files that matrices lie in outlive the layers;
  // the reference takes no such thing and keeps its copies.
  static Result<std::unique_ptr<CpuBackend>> create(Isa isa, uint32_t num_threads,
                                                    std::vector<int> cpus = {},
                                                    WeightsLayout layout = WeightsLayout::kPacked);
  ~CpuBackend() override;

  Isa isa() const;
  uint32_t num_threads() const;
  // Experts keep `formats` when resident. Errors: kUnsupported where the class does not take the
  // formats or this instruction set not the class.
  Result<std::unique_ptr<ExpertLayer>> create_layer(
      const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats,
      NumericsClass numerics = NumericsClass::kF32Canonical) override;
  Result<uint64_t> predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                   ResidentFormats formats, NumericsClass numerics) const override;
  // The classes that `isa` computes, f32-canonical first.
  static std::vector<NumericsClass> numerics_classes(Isa isa);

  // Bytes that a layer of `num_local_experts` experts will hold with the kernels of `isa`, biases
  // aside.
  static uint64_t predicted_bytes(Isa isa, const FfnSpec& spec, uint32_t num_local_experts,
                                  ResidentFormats formats);

 private:
  CpuBackend();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::compute
