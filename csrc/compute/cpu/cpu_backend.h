// The CPU backend: one instruction set, chosen at construction, and the worker's thread pool.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "compute/cpu/instruction_sets.h"
#include "compute/experts/expert_backend.h"

namespace dflash::compute {

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
      NumericsClass numerics = kDefaultNumerics) override;
  Result<uint64_t> predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                   ResidentFormats formats, NumericsClass numerics) const override;
  // The classes that `isa` computes, in the order of the table: the default first.
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
