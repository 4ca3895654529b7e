// The CPU backend: kernels per instruction set, chosen at construction, and the worker's thread pool.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "compute/expert_layer.h"

namespace dflash::compute {

// Instruction sets this build has kernels for. Values are internal.
enum class Isa : uint8_t { kReference = 0, kScalar = 1, kAvx2 = 2, kAvx512 = 3, kNeon = 4 };
// Every set of any build, best last among those of one processor.
inline constexpr Isa kAllIsas[] = {Isa::kReference, Isa::kScalar, Isa::kNeon, Isa::kAvx2, Isa::kAvx512};
const char* isa_name(Isa isa);                 // "reference" "scalar" "avx2" "avx512" "neon"
bool isa_is_supported(Isa isa);                // by this build and this processor
Isa best_isa();
// Errors: kInvalidArgument listing the sets this processor supports.
Result<Isa> parse_isa(const std::string& name);

class ThreadPool;  // thread_pool.h

class CpuBackend {
 public:
  // num_threads >= 1, the calling thread counted; pool threads are pinned to `cpus` when given (one each, after the caller's).
  static Result<std::unique_ptr<CpuBackend>> create(Isa isa, uint32_t num_threads, std::vector<int> cpus = {});
  ~CpuBackend();

  Isa isa() const;
  uint32_t num_threads() const;
  static const char* numerics_class() { return "f32-canonical"; }
  // Experts keep `formats` when resident; kernels dequantise to the very float32 of the format's formula.
  Result<std::unique_ptr<ExpertLayer>> create_layer(const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats);

  // Bytes that a layer of `num_local_experts` experts will hold with the kernels of `isa`, biases aside.
  static uint64_t predicted_bytes(Isa isa, const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats);

 private:
  CpuBackend();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::compute
