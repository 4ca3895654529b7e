// Fills layers with random experts and times their forwards. Multiplies the panels of all experts
// with rows that are made once, where the cutting into tasks, tiles and passes is that of the
// layer's forward.
// SPDX-License-Identifier: Apache-2.0
#include "measure/layer_benchmark.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/float_mode.h"
#include "compute/experts/random_expert.h"

namespace dflash::measure {
namespace {

constexpr int64_t kSpinNs = 20'000;  // as the layer's pool spins between the two products
constexpr size_t kWidestPanel = 32;  // the widest of any kernel set
constexpr size_t kTileFloats =
    kWidestPanel * std::max(compute::kFewRows * compute::kMaxGroupPanels,
                            compute::kMaxCallRows* compute::kManyRowsPanels);

// The number of tasks of one matrix, which are runs of at most kMaxGroupPanels panels.
uint32_t num_runs(uint32_t num_panels) {
  return (num_panels + compute::kMaxGroupPanels - 1) / compute::kMaxGroupPanels;
}

}  // namespace

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

GemmBenchmark::GemmBenchmark(const LayerBenchmarkOptions& options,
                             const compute::KernelSet& kernels, compute::PackedExperts experts,
                             std::unique_ptr<compute::ThreadPool> pool)
    : options_(options), kernels_(kernels), experts_(std::move(experts)), pool_(std::move(pool)) {}

Result<std::unique_ptr<GemmBenchmark>> GemmBenchmark::create(const LayerBenchmarkOptions& options) {
  DFLASH_TRY(options.spec.validate());
  DFLASH_TRY(compute::check_numerics(options.numerics, options.formats));
  const compute::KernelSet* kernels = options.isa == compute::Isa::kReference
                                          ? nullptr
                                          : compute::kernel_set(options.isa, options.numerics);
  if (kernels == nullptr) {
    return Error{ErrorCode::kUnsupported, std::string("CPU kernel set '") +
                                              compute::isa_name(options.isa) +
                                              "' has no matrix kernels of class " +
                                              compute::numerics_name(options.numerics)};
  }
  auto experts =
      compute::PackedExperts::create(options.spec, options.num_experts, options.formats, *kernels);
  if (!experts.ok()) return std::move(experts).error();
  auto pool = compute::ThreadPool::create(options.num_threads, {}, kSpinNs);
  if (!pool.ok()) return std::move(pool).error();
  check(kernels->panel_width <= kWidestPanel, "a tile holds every kernel set's panels");
  std::unique_ptr<GemmBenchmark> made(
      new GemmBenchmark(options, *kernels, std::move(experts).value(), std::move(pool).value()));
  const compute::RandomExpert random(options.spec, options.formats, options.seed);
  compute::YieldingProgress progress{0};
  for (uint32_t expert = 0; expert < options.num_experts; ++expert) {
    DFLASH_TRY(made->experts_.load(options.spec, expert, random.weights(), progress));
  }
  DFLASH_TRY(made->make_rows());
  return made;
}

Status GemmBenchmark::make_rows() {
  const uint32_t longest = std::max(options_.spec.in_size, options_.spec.intermediate_size);
  const size_t encoded =
      kernels_.encode == nullptr ? sizeof(float) * longest : kernels_.encoded_bytes(longest);
  // As in the layer, the stride is an odd number of lines, so that rows do not share cache sets.
  const size_t stride = ((encoded + 63) / 64 | 1) * 64;
  auto rows = compute::PageBuffer::create(stride * compute::kMaxCallRows);
  if (!rows.ok()) return std::move(rows).error();
  rows_ = std::move(rows).value();
  std::vector<float> values(longest);
  for (uint32_t row = 0; row < compute::kMaxCallRows; ++row) {
    for (uint32_t k = 0; k < longest; ++k)
      values[k] = static_cast<float>((row + 7 * k) % 31) / 16.0f - 1.0f;
    std::byte* at = rows_.data() + row * stride;
    if (kernels_.encode != nullptr)
      kernels_.encode(values.data(), longest, at);
    else
      std::copy(values.begin(), values.end(), reinterpret_cast<float*>(at));
    row_at_.push_back(at);
  }
  return ok();
}

void GemmBenchmark::multiply(const compute::PanelRun& run, uint32_t rows_per_expert) const {
  const uint32_t num_tiles = (rows_per_expert + compute::kMaxCallRows - 1) / compute::kMaxCallRows;
  for (uint32_t tile = 0; tile < num_tiles; ++tile)
    multiply_tile(run, rows_per_expert / num_tiles + (tile < rows_per_expert % num_tiles ? 1 : 0));
}

// Multiplies in passes of as many panels as the layer's kernels take at a time.
void GemmBenchmark::multiply_tile(const compute::PanelRun& run, uint32_t num_rows) const {
  alignas(64) float tile[kTileFloats];
  const uint32_t at_once =
      num_rows <= compute::kFewRows ? run.num_panels : compute::kManyRowsPanels;
  for (uint32_t first = 0; first < run.num_panels; first += at_once) {
    compute::PanelRun part = run;
    part.first = run.first + first * run.panel_bytes;
    part.num_panels = std::min(at_once, run.num_panels - first);
    if (run.bias != nullptr) part.bias = run.bias + size_t{first} * kernels_.panel_width;
    kernels_.multiply(num_rows, part, row_at_.data(), tile);
  }
}

void GemmBenchmark::multiply_all(uint32_t rows_per_expert) {
  const uint32_t matrices = experts_.num_matrices();
  const uint32_t gate_up_panels = experts_.num_intermediate_panels(),
                 down_panels = experts_.num_out_panels();
  const uint32_t gate_up_step = compute::kMaxGroupPanels / matrices;
  const uint32_t gate_up_runs = (gate_up_panels + gate_up_step - 1) / gate_up_step,
                 down_runs = num_runs(down_panels);
  pool_->run(uint64_t{options_.num_experts} * gate_up_runs, [&](uint64_t task) {
    const uint32_t first = static_cast<uint32_t>(task % gate_up_runs) * gate_up_step;
    multiply(experts_.gate_up(static_cast<uint32_t>(task / gate_up_runs), first,
                              std::min(gate_up_step, gate_up_panels - first)),
             rows_per_expert);
  });
  pool_->run(uint64_t{options_.num_experts} * down_runs, [&](uint64_t task) {
    const uint32_t first = static_cast<uint32_t>(task % down_runs) * compute::kMaxGroupPanels;
    multiply(experts_.down(static_cast<uint32_t>(task / down_runs), first,
                           std::min(compute::kMaxGroupPanels, down_panels - first)),
             rows_per_expert);
  });
}

std::vector<int64_t> GemmBenchmark::run(uint32_t rows_per_expert, uint32_t rounds) {
  const CanonicalFloatMode mode;
  std::vector<int64_t> found;
  for (uint32_t round = 0; round < rounds; ++round) {
    const int64_t began = now_ns();
    multiply_all(rows_per_expert);
    found.push_back(now_ns() - began);
  }
  return found;
}

}  // namespace dflash::measure
