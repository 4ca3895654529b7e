// The forward of the CPU backend. Phase 1 (gate, up, activation) is parallel over experts and
// intermediate columns, phase 2 (down, routed sum) over output columns, with experts ascending
// inside a task. Every value is written by one task in one order, so that the number of threads and
// the size of tasks never change a bit.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/cpu_layer.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
#include "compute/experts/layer_checks.h"

namespace dflash::compute {
namespace {

// Weights that a task reads again for each of its tiles of rows. They should stay in the
// second-level cache; this is half of the smallest in use (1 MiB).
constexpr size_t kTaskWeightBytes = size_t{512} << 10;
// Bound of the scratch. A batch that needs more is computed in portions of rows, and reads the
// weights again for each: 4,096 rows of 2,048 values with eight experts of 768 each still fit.
constexpr size_t kMaxScratchBytes = size_t{256} << 20;
constexpr uint32_t kWidenRows = 32;  // rows that one task widens or encodes
// With four tasks per thread, an uneven one costs at most a quarter of a thread's share.
constexpr uint32_t kTasksPerThread = 4;
// A single row needs this many panels side by side to hide the latency of an fma.
constexpr uint32_t kFewRowsPanels = 4;

// Strides of rows in floats and in bytes, rounded up to an odd number of cache lines, so that the
// rows of a tile do not compete for the same cache sets.
size_t padded_stride(size_t count) { return ((count + 15) / 16 | 1) * 16; }

size_t padded_bytes(size_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

// Bytes from one encoded row of `count` values to the next; 0 where the set does not encode rows.
size_t encoded_stride(const KernelSet& kernels, uint32_t count) {
  return kernels.encoded_bytes == nullptr ? 0 : padded_bytes(kernels.encoded_bytes(count));
}

// The rows of one tile when `count` rows are cut evenly into `num_tiles` tiles.
struct TileRows {
  uint32_t begin;
  uint32_t size;
};
TileRows tile_rows(uint32_t count, uint32_t num_tiles, uint32_t tile) {
  const uint32_t base = count / num_tiles, extra = count % num_tiles;
  return {tile * base + std::min(tile, extra), base + (tile < extra ? 1 : 0)};
}

// Returns the panels of one task: as many as fit the weight budget but at least `least`, in whole
// fours, and few enough that every thread gets its tasks. `num_other` is the number of experts that
// multiply the tasks, or 1.
uint32_t panels_per_task(size_t panel_bytes, uint32_t num_panels, uint32_t num_other,
                         uint32_t least, uint32_t num_threads) {
  uint32_t size = static_cast<uint32_t>(
      std::clamp<size_t>(kTaskWeightBytes / panel_bytes, least, kMaxGroupPanels));
  if (size > kFewRowsPanels) size -= size % kFewRowsPanels;
  if (num_threads > 1) {
    const uint64_t wanted_tasks = uint64_t{num_threads} * kTasksPerThread;
    const uint64_t feeds_all = uint64_t{num_panels} * num_other / wanted_tasks;
    size = static_cast<uint32_t>(std::min<uint64_t>(size, std::max<uint64_t>(feeds_all, 1)));
  }
  return size;
}

// Keeps the first error of a run's tasks; any thread. A run goes on after an error, without the
// panels that could not be read.
class FirstError {
 public:
  void keep(Error error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  Status take() {
    const std::lock_guard lock(mutex_);
    if (error_) return std::move(*error_);
    return ok();
  }

 private:
  std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace

size_t ForwardScratch::num_bytes() const {
  size_t bytes = block.num_bytes();
  for (const PanelScratch& thread : panels) bytes += thread.panels.num_bytes();
  return bytes;
}

CpuLayer::CpuLayer(const FfnSpec& spec, PackedExperts experts, const KernelSet& kernels,
                   ThreadPool& pool, ScratchPool<ForwardScratch>& scratch)
    : spec_(spec),
      experts_(std::move(experts)),
      kernels_(kernels),
      pool_(pool),
      scratch_(scratch),
      row_stride_(padded_stride(spec.in_size)),
      encoded_row_stride_(encoded_stride(kernels, spec.in_size)),
      encoded_intermediate_stride_(
          kernels.gate_up_encodes ? 0 : encoded_stride(kernels, spec.intermediate_size)),
      intermediate_value_bytes_(
          kernels.gate_up_encodes ? kernels.encoded_bytes(kernels.panel_width) / kernels.panel_width
                                  : sizeof(float)),
      intermediate_stride_(padded_bytes(size_t{experts_.num_intermediate_panels()} *
                                        kernels.panel_width * intermediate_value_bytes_)) {}

Status CpuLayer::load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                             YieldingProgress& progress) {
  return experts_.load(spec_, local_expert_id, weights, progress);
}

Status CpuLayer::forward(const ForwardArgs& args, YieldingProgress& progress) {
  const OperatorScope scope(Operator::kExpertGroups);
  DFLASH_TRY(check_batch(args, num_local_experts()));
  for (uint16_t id : args.local_expert_ids) {
    if (!experts_.is_loaded(id)) {
      return Error{ErrorCode::kInvalidArgument, "local expert " + std::to_string(id) +
                                                    " was not loaded; load it before forward"};
    }
  }
  const CanonicalFloatMode mode;
  const auto scratch = scratch_.lend();
  uint32_t row = 0, pair = 0;
  while (row < args.num_rows) {
    const Portion portion = next_portion(args, row, pair);
    DFLASH_TRY(forward_portion({args, portion, *scratch, progress}));
    row += portion.num_rows;
    pair += portion.num_pairs;
  }
  return ok();
}

CpuLayer::Portion CpuLayer::next_portion(const ForwardArgs& args, uint32_t first_row,
                                         uint32_t first_pair) const {
  Portion portion{first_row, 0, first_pair, 0};
  size_t bytes = 0;
  for (uint32_t row = first_row; row < args.num_rows; ++row) {
    const uint32_t pairs = args.row_counts[row];
    bytes += bytes_per_row() + pairs * bytes_per_pair();
    if (portion.num_rows != 0 && bytes > kMaxScratchBytes) break;
    ++portion.num_rows;
    portion.num_pairs += pairs;
  }
  return portion;
}

size_t CpuLayer::bytes_per_row() const {
  const size_t sums = size_t{experts_.num_out_panels()} * kernels_.panel_width;
  return sizeof(float) * (row_stride_ + sums) + encoded_row_stride_;
}

Status CpuLayer::forward_portion(const Run& run) const {
  const ForwardArgs& args = run.args;
  const Portion& portion = run.portion;
  run.scratch.groups.build(args.row_counts.subspan(portion.first_row, portion.num_rows),
                           args.local_expert_ids.subspan(portion.first_pair, portion.num_pairs),
                           args.weights.subspan(portion.first_pair, portion.num_pairs),
                           num_local_experts());
  const FirstReads after = pool_.expected();
  pool_.expect(gate_up_first(run.scratch.groups));
  DFLASH_TRY(place_scratch(run));
  widen_rows(run);
  // In a worker, the serving thread may move bytes of its data path here.
  run.progress.count_and_yield();
  pool_.expect(down_first(run.scratch.groups));
  DFLASH_TRY(run_gate_up(run));
  encode_intermediate(run);
  pool_.expect(after);
  auto in_range = run_down(run);
  if (!in_range.ok()) return std::move(in_range).error();
  if (in_range.value()) return ok();
  return first_range_error(run);
}

Status CpuLayer::place_scratch(const Run& run) const {
  const auto [args, portion, s, progress] = run;
  const size_t row_floats = portion.num_rows * row_stride_;
  const size_t sum_floats =
      size_t{portion.num_rows} * experts_.num_out_panels() * kernels_.panel_width;
  const size_t float_bytes = (sizeof(float) * (row_floats + sum_floats) + 63) / 64 * 64;
  const size_t encoded_row_bytes = portion.num_rows * encoded_row_stride_;
  const size_t intermediate_bytes = portion.num_pairs * intermediate_stride_;
  auto room = s.block.room_for(float_bytes + encoded_row_bytes + intermediate_bytes +
                               portion.num_pairs * encoded_intermediate_stride_);
  if (!room.ok()) return std::move(room).error();
  s.rows = reinterpret_cast<float*>(room.value());
  s.sums = s.rows + row_floats;
  s.encoded_rows = room.value() + float_bytes;
  s.intermediate = s.encoded_rows + encoded_row_bytes;
  s.encoded_intermediate = s.intermediate + intermediate_bytes;
  s.panels.resize(pool_.num_threads());
  s.pair_rows.resize(portion.num_pairs);
  s.pair_intermediate.resize(portion.num_pairs);
  s.pair_inputs.resize(portion.num_pairs);
  for (uint32_t pair = 0; pair < portion.num_pairs; ++pair) {
    const size_t row = s.groups.rows()[pair];
    s.pair_intermediate[pair] = s.intermediate + pair * intermediate_stride_;
    if (encoded_row_stride_ == 0)
      s.pair_rows[pair] = s.rows + row * row_stride_;
    else
      s.pair_rows[pair] = s.encoded_rows + row * encoded_row_stride_;
    if (encoded_intermediate_stride_ == 0)
      s.pair_inputs[pair] = s.pair_intermediate[pair];
    else
      s.pair_inputs[pair] = s.encoded_intermediate + pair * encoded_intermediate_stride_;
  }
  return ok();
}

void CpuLayer::widen_rows(const Run& run) const {
  const OperatorScope scope(Operator::kExpertRows);
  const ForwardArgs& args = run.args;
  const uint32_t num_rows = run.portion.num_rows;
  const ForwardScratch& s = run.scratch;
  const size_t row_bytes = spec_.in_size * dtype_bytes(args.row_dtype);
  const std::byte* source = args.rows + run.portion.first_row * row_bytes;
  pool_.run((num_rows + kWidenRows - 1) / kWidenRows, [&](uint64_t task) {
    const uint32_t first = static_cast<uint32_t>(task) * kWidenRows;
    const uint32_t end = std::min(num_rows, first + kWidenRows);
    for (uint32_t row = first; row < end; ++row) {
      widen(args.row_dtype, source + row * row_bytes, s.rows + row * row_stride_, spec_.in_size);
      if (kernels_.encode == nullptr) continue;
      kernels_.encode(s.rows + row * row_stride_, spec_.in_size,
                      s.encoded_rows + row * encoded_row_stride_);
    }
  });
}

void CpuLayer::encode_intermediate(const Run& run) const {
  if (encoded_intermediate_stride_ == 0) return;
  const OperatorScope scope(Operator::kExpertEncode);
  const uint32_t num_pairs = run.portion.num_pairs;
  pool_.run((num_pairs + kWidenRows - 1) / kWidenRows, [&](uint64_t task) {
    const uint32_t first = static_cast<uint32_t>(task) * kWidenRows;
    for (uint32_t pair = first; pair < std::min(num_pairs, first + kWidenRows); ++pair) {
      const float* values = reinterpret_cast<const float*>(run.scratch.pair_intermediate[pair]);
      kernels_.encode(values, spec_.intermediate_size,
                      run.scratch.encoded_intermediate + pair * encoded_intermediate_stride_);
    }
    // In a worker, the serving thread may move bytes of its data path here.
    run.progress.count_and_yield();
  });
}

uint32_t CpuLayer::gate_up_panels_per_task(const ExpertGroups& groups) const {
  const uint32_t matrices = experts_.num_matrices();
  const uint32_t least = groups.most_pairs() <= kFewRows ? kFewRowsPanels : matrices;
  const uint32_t num_panels = experts_.num_intermediate_panels() * matrices;
  const uint32_t panels =
      panels_per_task(experts_.gate_up_panel_bytes(), num_panels,
                      static_cast<uint32_t>(groups.groups().size()), least, pool_.num_threads());
  return std::max(panels / matrices, 1u);
}

uint32_t CpuLayer::down_panels_per_task(const ExpertGroups& groups) const {
  const uint32_t least = groups.most_pairs() <= kFewRows ? kFewRowsPanels : 1;
  return panels_per_task(experts_.down_panel_bytes(), experts_.num_out_panels(), 1, least,
                         pool_.num_threads());
}

FirstReads CpuLayer::gate_up_first(const ExpertGroups& groups) const {
  if (experts_.is_mapped() || groups.groups().empty()) return {};
  const uint32_t per_task = gate_up_panels_per_task(groups);
  return {experts_.gate_up(groups.groups().front().local_expert_id, 0, 1).first,
          per_task * experts_.num_matrices() * experts_.gate_up_panel_bytes()};
}

FirstReads CpuLayer::down_first(const ExpertGroups& groups) const {
  if (experts_.is_mapped() || groups.groups().empty()) return {};
  return {experts_.down(groups.groups().front().local_expert_id, 0, 1).first,
          down_panels_per_task(groups) * experts_.down_panel_bytes()};
}

void CpuLayer::order_groups(const Run& run) const {
  std::vector<uint32_t>& order = run.scratch.order;
  order.resize(run.groups().size());
  std::iota(order.begin(), order.end(), 0);
  const ExpertArrivals* arrivals = run.args.arrivals;
  if (arrivals == nullptr) return;
  std::stable_partition(order.begin(), order.end(), [&](uint32_t group) {
    return arrivals->has_come(run.groups()[group].local_expert_id, ExpertPart::kGateUp);
  });
}

Status CpuLayer::run_gate_up(const Run& run) const {
  OperatorScope scope(Operator::kExpertGateUp);
  const ForwardScratch& s = run.scratch;
  const uint32_t num_panels = experts_.num_intermediate_panels();
  const uint64_t matrices = experts_.num_matrices();
  scope.count(run.groups().size() * matrices * num_panels * experts_.gate_up_panel_bytes(),
              s.groups.rows().size() * matrices * spec_.in_size * spec_.intermediate_size,
              numerics_name(kernels_.numerics));
  const uint32_t per_task = gate_up_panels_per_task(s.groups);
  const uint32_t tasks_per_expert = (num_panels + per_task - 1) / per_task;
  const uint64_t num_tasks = run.groups().size() * tasks_per_expert;
  order_groups(run);
  const auto group_of = [&](uint64_t task) -> const ExpertGroup& {
    return run.groups()[s.order[task / tasks_per_expert]];
  };
  FirstError failed;
  pool_.run_on_threads(num_tasks, [&](uint64_t task, uint32_t thread) {
    const ExpertGroup& group = group_of(task);
    if (run.args.arrivals != nullptr) {
      Status came = run.args.arrivals->await(group.local_expert_id, ExpertPart::kGateUp);
      if (!came.ok()) return failed.keep(std::move(came).error());
    }
    const uint32_t first_panel = static_cast<uint32_t>(task % tasks_per_expert) * per_task;
    const size_t first_byte =
        size_t{first_panel} * kernels_.panel_width * intermediate_value_bytes_;
    auto panels = experts_.read_gate_up(group.local_expert_id, first_panel,
                                        std::min(per_task, num_panels - first_panel),
                                        run.scratch.panels[thread]);
    if (!panels.ok()) return failed.keep(std::move(panels).error());
    GateUpTile tile{};
    tile.panels = panels.value();
    const uint64_t next = task + pool_.num_threads();  // most likely this thread's next task
    if (next < num_tasks) {
      const uint32_t next_expert = group_of(next).local_expert_id;
      tile.panels.next =
          experts_
              .gate_up(next_expert, static_cast<uint32_t>(next % tasks_per_expert) * per_task, 1)
              .first;
    }
    tile.spec = &spec_;
    const uint32_t num_tiles = (group.num_pairs + kMaxCallRows - 1) / kMaxCallRows;
    for (uint32_t t = 0; t < num_tiles; ++t) {
      const TileRows range = tile_rows(group.num_pairs, num_tiles, t);
      void* outputs[kMaxCallRows];
      for (uint32_t i = 0; i < range.size; ++i)
        outputs[i] = s.pair_intermediate[group.first_pair + range.begin + i] + first_byte;
      tile.rows = s.pair_rows.data() + group.first_pair + range.begin;
      tile.num_rows = range.size;
      tile.intermediate = outputs;
      kernels_.gate_up(tile);
      // In a worker, the serving thread may move bytes of its data path here.
      run.progress.count_and_yield();
    }
  });
  return failed.take();
}

Result<bool> CpuLayer::run_down(const Run& run) const {
  OperatorScope scope(Operator::kExpertDown);
  const ForwardScratch& s = run.scratch;
  const uint32_t num_rows = run.portion.num_rows;
  const uint32_t num_panels = experts_.num_out_panels();
  scope.count(run.groups().size() * num_panels * experts_.down_panel_bytes(),
              s.groups.rows().size() * spec_.intermediate_size * spec_.out_size,
              numerics_name(kernels_.numerics));
  const uint32_t per_task = down_panels_per_task(s.groups);
  std::atomic<bool> in_range{true};  // relaxed: read after the run, whose end synchronises
  FirstError failed;
  pool_.run_on_threads((num_panels + per_task - 1) / per_task, [&](uint64_t task, uint32_t thread) {
    const uint32_t first_panel = static_cast<uint32_t>(task) * per_task;
    const uint32_t task_panels = std::min(per_task, num_panels - first_panel);
    const size_t columns = size_t{task_panels} * kernels_.panel_width;
    float* sums = s.sums + size_t{first_panel} * kernels_.panel_width * num_rows;
    std::memset(sums, 0, sizeof(float) * columns * num_rows);
    for (size_t g = 0; g < run.groups().size(); ++g) {
      const ExpertGroup& group = run.groups()[g];
      if (run.args.arrivals != nullptr) {
        Status came = run.args.arrivals->await(group.local_expert_id, ExpertPart::kDown);
        if (!came.ok()) return failed.keep(std::move(came).error());
      }
      auto panels = experts_.read_down(group.local_expert_id, first_panel, task_panels,
                                       run.scratch.panels[thread]);
      if (!panels.ok()) return failed.keep(std::move(panels).error());
      DownTile tile{};
      tile.panels = panels.value();
      if (g + 1 < run.groups().size()) {
        tile.panels.next =
            experts_.down(run.groups()[g + 1].local_expert_id, first_panel, task_panels).first;
      }
      const uint32_t num_tiles = (group.num_pairs + kMaxCallRows - 1) / kMaxCallRows;
      for (uint32_t t = 0; t < num_tiles; ++t) {
        const TileRows range = tile_rows(group.num_pairs, num_tiles, t);
        const uint32_t first_pair = group.first_pair + range.begin;
        float* tile_sums[kMaxCallRows];
        for (uint32_t i = 0; i < range.size; ++i)
          tile_sums[i] = sums + s.groups.rows()[first_pair + i] * columns;
        tile.rows = s.pair_inputs.data() + first_pair;
        tile.num_rows = range.size;
        tile.weights = s.groups.weights().data() + first_pair;
        tile.sums = tile_sums;
        kernels_.down(tile);
        // In a worker, the serving thread may move bytes of its data path here.
        run.progress.count_and_yield();
      }
    }
    if (!finish_columns(run, first_panel, task_panels))
      in_range.store(false, std::memory_order_relaxed);
    // In a worker, the serving thread may move bytes of its data path here.
    run.progress.count_and_yield();
  });
  DFLASH_TRY(failed.take());
  return in_range.load(std::memory_order_relaxed);
}

bool CpuLayer::finish_columns(const Run& run, uint32_t first_panel, uint32_t num_panels) const {
  const auto [args, portion, s, progress] = run;
  const size_t first_column = size_t{first_panel} * kernels_.panel_width;
  const size_t columns = size_t{num_panels} * kernels_.panel_width;
  const size_t real_columns = std::min(columns, spec_.out_size - first_column);
  const size_t element = dtype_bytes(args.reply_dtype);
  float* sums = s.sums + first_column * portion.num_rows;
  kernels_.canonicalize_nan(sums, columns * portion.num_rows);
  bool in_range = true;
  for (uint32_t row = 0; row < portion.num_rows; ++row) {
    std::byte* reply =
        args.reply + ((size_t{portion.first_row} + row) * spec_.out_size + first_column) * element;
    in_range &= convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums + row * columns),
                        args.reply_dtype, reply, real_columns);
  }
  return in_range;
}

Error CpuLayer::first_range_error(const Run& run) const {
  const auto [args, portion, s, progress] = run;
  const uint32_t per_task = down_panels_per_task(s.groups);
  const uint32_t width = kernels_.panel_width;
  for (uint32_t row = 0; row < portion.num_rows; ++row) {
    for (uint32_t column = 0; column < spec_.out_size; ++column) {
      const uint32_t first_panel = column / (per_task * width) * per_task;
      const size_t columns =
          size_t{std::min(per_task, experts_.num_out_panels() - first_panel)} * width;
      const float value = s.sums[size_t{first_panel} * width * portion.num_rows + row * columns +
                                 (column - size_t{first_panel} * width)];
      if (overflows(value, args.reply_dtype))
        return range_error(portion.first_row + row, column, value, args.reply_dtype);
    }
  }
  return Error{ErrorCode::kRange, "a value exceeds the range of the reply dtype"};
}

}  // namespace dflash::compute
