// The CPU backend: an instruction set, chosen at construction, and a pool of threads, its own or
// one that it shares with others of the process.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/thread_pool.h"
#include "compute/experts/expert_backend.h"

namespace dflash::compute {

// Its layers share its threads, so that only one of them may compute at a time.
class CpuBackend final : public ExpertBackend {
 public:
  // `num_threads` >= 1 counts the calling thread. Pool threads are pinned to `cpus` where given,
  // one each, and the caller's own is cpus[0]. With layout `mapped`, the files in which matrices
  // lie must outlive the layers; the reference keeps copies under either layout. Errors:
  // kInvalidArgument for an instruction set that this processor lacks, and those of
  // ThreadPool::create.
  static Result<std::unique_ptr<CpuBackend>> create(Isa isa, uint32_t num_threads,
                                                    std::vector<int> cpus = {},
                                                    WeightsLayout layout = WeightsLayout::kPacked);
  // The same over a pool that others use too. Errors: kInvalidArgument for the instruction set.
  static Result<std::unique_ptr<CpuBackend>> create(Isa isa, std::shared_ptr<ThreadPool> pool,
                                                    WeightsLayout layout);
  ~CpuBackend() override;

  Isa isa() const;
  uint32_t num_threads() const;
  // Makes a layer whose experts stay resident in `formats`; the backend must outlive it. Errors:
  // kUnsupported where the class does not take the formats, this instruction set does not compute
  // the class, or the number of experts is out of range; kOutOfMemory.
  Result<std::unique_ptr<ExpertLayer>> create_layer(
      const FfnSpec& spec, uint32_t num_local_experts, ResidentFormats formats,
      NumericsClass numerics = kDefaultNumerics) override;
  Result<uint64_t> predicted_bytes(const FfnSpec& spec, uint32_t num_local_experts,
                                   ResidentFormats formats, NumericsClass numerics) const override;
  // The classes that `isa` computes, in the order of the table, so that the default comes first.
  static std::vector<NumericsClass> numerics_classes(Isa isa);

  // Bytes that a layer of `num_local_experts` experts will hold with the kernels of `isa`, without
  // its biases.
  static uint64_t predicted_bytes(Isa isa, const FfnSpec& spec, uint32_t num_local_experts,
                                  ResidentFormats formats);

 private:
  CpuBackend();
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace dflash::compute
