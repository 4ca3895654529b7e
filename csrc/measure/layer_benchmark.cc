// Fills layers with random experts and times their forwards.
// SPDX-License-Identifier: Apache-2.0
#include "measure/layer_benchmark.h"

#include "base/clock.h"
#include "compute/experts/random_expert.h"

namespace dflash::measure {
Result<std::unique_ptr<LayerBenchmark>> LayerBenchmark::create(
    const LayerBenchmarkOptions& options, std::unique_ptr<compute::ExpertBackend> backend) {
  if (options.num_layers < 1 || options.num_layers > 4096) {
    return Error{ErrorCode::kInvalidArgument, "a benchmark rotates over 1..4096 layers, not " +
                                                  std::to_string(options.num_layers)};
  }
  if (backend == nullptr) {
    auto cpu = compute::CpuBackend::create(options.isa, options.num_threads);
    if (!cpu.ok()) return std::move(cpu).error();
    backend = std::move(cpu).value();
  }
  std::unique_ptr<LayerBenchmark> benchmark(new LayerBenchmark(options));
  benchmark->backend_ = std::move(backend);
  DFLASH_TRY(benchmark->fill());
  return benchmark;
}

Status LayerBenchmark::fill() {
  const compute::RandomExpert random(options_.spec, options_.formats, options_.seed);
  for (uint32_t l = 0; l < options_.num_layers; ++l) {
    auto layer = backend_->create_layer(options_.spec, options_.num_experts, options_.formats,
                                        options_.numerics);
    if (!layer.ok()) return std::move(layer).error();
    for (uint32_t expert = 0; expert < options_.num_experts; ++expert) {
      DFLASH_TRY(layer.value()->load_expert(expert, random.weights(), progress_));
    }
    layers_.push_back(std::move(layer).value());
  }
  return ok();
}

Result<std::vector<int64_t>> LayerBenchmark::run(const compute::ForwardArgs& args,
                                                 uint32_t rounds) {
  std::vector<int64_t> found;
  found.reserve(rounds);
  for (uint32_t round = 0; round < rounds; ++round) {
    compute::ExpertLayer& layer = *layers_[next_layer_];
    next_layer_ = (next_layer_ + 1) % layers_.size();
    const int64_t began = now_ns();
    DFLASH_TRY(layer.forward(args, progress_));
    found.push_back(now_ns() - began);
  }
  return found;
}

int64_t LayerBenchmark::device_ns() const {
  int64_t total = 0;
  for (const auto& layer : layers_) total += layer->device_ns();
  return total;
}

uint64_t LayerBenchmark::resident_bytes() const {
  uint64_t total = 0;
  for (const auto& layer : layers_) total += layer->resident_bytes();
  return total;
}

}  // namespace dflash::measure
