// Times the forward of one shape of layer without anything around it, which is what `bench experts`
// measures. Several layers in rotation keep the weights out of the caches where they should come
// from memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "compute/cpu/cpu_backend.h"
#include "compute/cpu/packed_experts.h"
#include "compute/cpu/thread_pool.h"

namespace dflash::measure {

struct LayerBenchmarkOptions {
  compute::FfnSpec spec;
  uint32_t num_experts = 0;
  uint32_t num_layers = 1;
  compute::ResidentFormats formats;
  compute::NumericsClass numerics = compute::kDefaultNumerics;
  compute::Isa isa = compute::Isa::kScalar;
  uint32_t num_threads = 1;
  uint64_t seed = 1;
};

// Not thread-safe: forwards run one after the other on the caller's thread and the backend's.
class LayerBenchmark {
 public:
  // Fills every expert with random weights. All experts have the same values, each in memory of its
  // own. Without a `backend`, the CPU's is used with the instruction set and threads of `options`.
  // Errors: those of the backend, kOutOfMemory.
  static Result<std::unique_ptr<LayerBenchmark>> create(
      const LayerBenchmarkOptions& options,
      std::unique_ptr<compute::ExpertBackend> backend = nullptr);

  // Runs `rounds` forwards of the batch, each on the next layer, and returns the nanoseconds of
  // each. Errors: those of ExpertLayer::forward.
  Result<std::vector<int64_t>> run(const compute::ForwardArgs& args, uint32_t rounds);

  uint64_t resident_bytes() const;
  int64_t device_ns() const;  // summed over all forwards so far (see ExpertLayer)
  const compute::FfnSpec& spec() const { return options_.spec; }
  uint32_t num_experts() const { return options_.num_experts; }

 private:
  explicit LayerBenchmark(const LayerBenchmarkOptions& options) : options_(options) {}
  Status fill();

  LayerBenchmarkOptions options_;
  std::unique_ptr<compute::ExpertBackend> backend_;
  std::vector<std::unique_ptr<compute::ExpertLayer>> layers_;
  size_t next_layer_ = 0;
  compute::YieldingProgress progress_{0};
};

// The matrix products of one layer and nothing else: no widening, routing, activation or routed
// sum. Tiles and threads are those of the layer's forward, so that this is the rate against which
// the forward of many tokens is held.
class GemmBenchmark {
 public:
  // Makes the products of the options' first layer. Errors: those of LayerBenchmark::create, and
  // kUnsupported for a set without matrix kernels (the reference).
  static Result<std::unique_ptr<GemmBenchmark>> create(const LayerBenchmarkOptions& options);

  // Returns the nanoseconds of `rounds` passes with rows_per_expert rows through every expert.
  std::vector<int64_t> run(uint32_t rows_per_expert, uint32_t rounds);

 private:
  GemmBenchmark(const LayerBenchmarkOptions& options, const compute::KernelSet& kernels,
                compute::PackedExperts experts, std::unique_ptr<compute::ThreadPool> pool);
  Status make_rows();
  void multiply(const compute::PanelRun& run, uint32_t rows_per_expert) const;
  void multiply_tile(const compute::PanelRun& run, uint32_t num_rows) const;
  void multiply_all(uint32_t rows_per_expert);

  LayerBenchmarkOptions options_;
  const compute::KernelSet& kernels_;
  compute::PackedExperts experts_;
  std::unique_ptr<compute::ThreadPool> pool_;
  // kMaxCallRows rows in the form that the kernels take; every tile reads the same ones.
  compute::PageBuffer rows_;
  std::vector<const void*> row_at_;  // [kMaxCallRows]
};

}  // namespace dflash::measure
