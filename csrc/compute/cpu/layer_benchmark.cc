// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/layer_benchmark.h"

#include <random>

#include "base/clock.h"
#include "base/convert.h"

namespace dflash::compute {
namespace {

// A random matrix in the resident dtype, scaled so that activations neither vanish nor overflow.
class RandomMatrix {
 public:
  RandomMatrix(uint32_t outputs, uint32_t inputs, Dtype dtype, std::mt19937_64& random)
      : outputs_(outputs), inputs_(inputs), dtype_(dtype), bytes_(size_t{outputs} * inputs * dtype_bytes(dtype)) {
    std::vector<float> row(inputs);
    const float scale = 1.0f / static_cast<float>(inputs);
    for (uint32_t o = 0; o < outputs; ++o) {
      for (float& value : row) value = scale * static_cast<float>(static_cast<int32_t>(random() >> 40) - (1 << 23)) / (1 << 23);
      convert(Dtype::kF32, reinterpret_cast<const std::byte*>(row.data()), dtype, bytes_.data() + o * inputs * dtype_bytes(dtype), inputs);
    }
  }
  MatrixView view() const {
    MatrixView found;
    found.data = bytes_.data();
    found.format = format_of(dtype_);
    found.outputs = outputs_;
    found.inputs = inputs_;
    found.output_stride = inputs_;
    found.input_stride = 1;
    return found;
  }

 private:
  uint32_t outputs_, inputs_;
  Dtype dtype_;
  std::vector<std::byte> bytes_;
};

}  // namespace

Result<std::unique_ptr<LayerBenchmark>> LayerBenchmark::create(const LayerBenchmarkOptions& options) {
  if (options.num_layers < 1 || options.num_layers > 4096) {
    return Error{ErrorCode::kInvalidArgument, "a benchmark rotates over 1..4096 layers, not " + std::to_string(options.num_layers)};
  }
  auto backend = CpuBackend::create(options.isa, options.num_threads);
  if (!backend.ok()) return std::move(backend).error();
  std::unique_ptr<LayerBenchmark> benchmark(new LayerBenchmark(options));
  benchmark->backend_ = std::move(backend).value();
  DFLASH_TRY(benchmark->fill());
  return benchmark;
}

Status LayerBenchmark::fill() {
  const FfnSpec& spec = options_.spec;
  std::mt19937_64 random(options_.seed);
  const RandomMatrix gate(spec.intermediate_size, spec.in_size, options_.weight_dtype, random);
  const RandomMatrix up(spec.intermediate_size, spec.in_size, options_.weight_dtype, random);
  const RandomMatrix down(spec.out_size, spec.intermediate_size, options_.weight_dtype, random);
  ExpertWeights weights;
  if (spec.gate != GateKind::kNone) weights.gate = gate.view();
  weights.up = up.view();
  weights.down = down.view();
  for (uint32_t l = 0; l < options_.num_layers; ++l) {
    auto layer = backend_->create_layer(spec, options_.num_experts, options_.weight_dtype);
    if (!layer.ok()) return std::move(layer).error();
    for (uint32_t expert = 0; expert < options_.num_experts; ++expert) {
      DFLASH_TRY(layer.value()->load_expert(expert, weights, progress_));
    }
    layers_.push_back(std::move(layer).value());
  }
  return ok();
}

Result<std::vector<int64_t>> LayerBenchmark::run(const ForwardArgs& args, uint32_t rounds) {
  std::vector<int64_t> found;
  found.reserve(rounds);
  for (uint32_t round = 0; round < rounds; ++round) {
    ExpertLayer& layer = *layers_[next_layer_];
    next_layer_ = (next_layer_ + 1) % layers_.size();
    const int64_t began = now_ns();
    DFLASH_TRY(layer.forward(args, progress_));
    found.push_back(now_ns() - began);
  }
  return found;
}

uint64_t LayerBenchmark::resident_bytes() const {
  uint64_t total = 0;
  for (const auto& layer : layers_) total += layer->resident_bytes();
  return total;
}

}  // namespace dflash::compute
