// The matrix products of one layer and nothing else: no widening, routing, activation or routed
// sum. Tiles and threads are those of the layer's forward, so that this is the rate against which
// the forward of many tokens is held.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/packed_experts.h"
#include "compute/cpu/thread_pool.h"
#include "measure/layer_benchmark.h"

namespace dflash::measure {

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
