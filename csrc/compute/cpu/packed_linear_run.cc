// The products of rows with packed linear layers. Rows are widened, and encoded where the class
// wants that, once per layer; then tasks take groups of panels, and with many rows also pieces of
// the rows. Every output is written by one task in one order, so that neither threads nor the size
// of tasks change a bit.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
#include "compute/cpu/packed_linear.h"
#include "compute/experts/layer_checks.h"

namespace dflash::compute {
namespace {

// Weights of one task. More would not stay in the second-level cache for the next tile of rows (1
// MiB in the smallest in use); for less, waking a thread costs more than it helps.
constexpr size_t kMaxTaskBytes = size_t{512} << 10;
constexpr size_t kMinTaskBytes = size_t{64} << 10;
// With four tasks per thread, an uneven one costs at most a quarter of a thread's share.
constexpr uint32_t kTasksPerThread = 4;
// A single row needs this many panels side by side to hide the latency of an fma.
constexpr uint32_t kFewRowsPanels = 4;
constexpr uint32_t kEncodeRows = 8;   // rows that one task widens and encodes
constexpr uint32_t kLeastPiece = 24;  // rows for which a piece of the rows is worth a task
// Rows beyond this much scratch are computed in portions, each of which reads the weights again.
constexpr size_t kMaxScratchBytes = size_t{64} << 20;

// Strides of rows in bytes, rounded up to an odd number of cache lines, so that the rows of a tile
// do not compete for the same cache sets.
size_t padded_bytes(size_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

uint64_t divide_up(uint64_t value, uint64_t by) { return (value + by - 1) / by; }

// `all_bytes` are the weights of all layers of a call, which share the threads.
size_t bytes_per_task(size_t all_bytes, uint32_t num_threads) {
  return std::clamp(all_bytes / (num_threads * kTasksPerThread), kMinTaskBytes, kMaxTaskBytes);
}

struct RowRange {
  uint32_t begin, size;
};
// Range `i` when rows are cut evenly into `count` ranges.
RowRange even_range(RowRange rows, uint32_t count, uint32_t i) {
  const uint32_t base = rows.size / count, extra = rows.size % count;
  return {rows.begin + i * base + std::min(i, extra), base + (i < extra ? 1 : 0)};
}

}  // namespace

// One layer's part of a call, or of one portion of its rows.
struct PackedLinear::Call {
  const PackedLinear& linear;
  ThreadPool& pool;
  const RowsView& rows;
  const RowsTarget& out;
  const RowsView* residual;
  RowRange portion;
  FirstOverflow& overflow;
  size_t widened_stride, encoded_stride;  // bytes
  std::byte* widened;                     // [portion rows, widened_stride], float32
  std::byte* encoded;                     // [portion rows, encoded_stride]

  // A group of panels of one part, times a piece of the rows.
  struct Task {
    const Part& part;
    uint32_t first_panel, num_panels;
    RowRange rows;  // counted from the portion's first
  };
  // How a part's panels are cut into groups.
  struct Groups {
    uint32_t panels;  // of one group; the last may have fewer
    uint64_t first;   // the number of its first group among those of all parts
  };
  std::vector<Groups> groups;
  uint64_t num_groups = 0;
  uint32_t num_pieces = 1;  // of the rows

  void encode_rows() const;
  // `all_bytes` are the weights of all layers of the call, which share the threads.
  void plan(size_t all_bytes);
  uint64_t num_tasks() const { return num_groups * num_pieces; }
  Task task_of(uint64_t number) const;
  PanelRun panels_of(const Task& task) const;
  void multiply(const Task& task, const PanelRun& panels) const;
  void finish(const Task& task, RowRange tile_rows, uint32_t first_panel, uint32_t num_panels,
              float* tile) const;
};

void PackedLinear::Call::encode_rows() const {
  auto body = [&](uint64_t task) {
    const uint32_t first = static_cast<uint32_t>(task) * kEncodeRows;
    for (uint32_t row = first; row < std::min(portion.size, first + kEncodeRows); ++row) {
      float* values = reinterpret_cast<float*>(widened + row * widened_stride);
      widen(rows.dtype, rows.data + (size_t{portion.begin} + row) * rows.stride_bytes, values,
            linear.row_width_);
      for (const Encoding& encoding : linear.encodings_) {
        encoding.kernels->encode(values + encoding.input_column, linear.inputs_,
                                 encoded + row * encoded_stride + encoding.at);
      }
    }
  };
  // A single task needs no turn at the pool.
  if (portion.size <= kEncodeRows) return body(0);
  pool.run(divide_up(portion.size, kEncodeRows), body);
}

uint32_t PackedLinear::panels_per_group(const Part& part, uint32_t num_rows, size_t wanted_bytes) {
  const uint32_t least = num_rows <= kFewRows ? kFewRowsPanels : 1;
  auto panels = static_cast<uint32_t>(
      std::clamp<size_t>(wanted_bytes / part.panel_bytes, least, kMaxGroupPanels));
  if (panels > kFewRowsPanels) panels -= panels % kFewRowsPanels;
  return panels;
}

void PackedLinear::Call::plan(size_t all_bytes) {
  const uint64_t wanted_tasks = uint64_t{pool.num_threads()} * kTasksPerThread;
  const size_t wanted_bytes = bytes_per_task(all_bytes, pool.num_threads());
  for (const Part& part : linear.parts_) {
    const uint32_t panels = panels_per_group(part, portion.size, wanted_bytes);
    groups.push_back({panels, num_groups});
    num_groups += divide_up(part.num_panels, panels);
  }
  if (pool.num_threads() == 1 || num_groups >= wanted_tasks) return;
  num_pieces = static_cast<uint32_t>(
      std::clamp<uint64_t>(portion.size / kLeastPiece, 1, divide_up(wanted_tasks, num_groups)));
}

PackedLinear::Call::Task PackedLinear::Call::task_of(uint64_t number) const {
  const uint64_t group = number / num_pieces;
  const auto found = std::prev(
      std::upper_bound(groups.begin(), groups.end(), group,
                       [](uint64_t wanted, const Groups& g) { return wanted < g.first; }));
  const Part& part = linear.parts_[static_cast<size_t>(found - groups.begin())];
  const uint32_t first_panel = static_cast<uint32_t>(group - found->first) * found->panels;
  return {part, first_panel, std::min(found->panels, part.num_panels - first_panel),
          even_range({0, portion.size}, num_pieces, static_cast<uint32_t>(number % num_pieces))};
}

PanelRun PackedLinear::Call::panels_of(const Task& task) const {
  const Part& part = task.part;
  const size_t first_column = size_t{task.first_panel} * part.kernels->panel_width;
  return {.first = linear.panels_.data() + part.first_byte + task.first_panel * part.panel_bytes,
          .format = part.format,
          .panel_bytes = part.panel_bytes,
          .num_panels = task.num_panels,
          .num_inputs = linear.inputs_,
          .bias = part.bias.empty() ? nullptr : part.bias.data() + first_column};
}

void PackedLinear::Call::multiply(const Task& task, const PanelRun& panels) const {
  alignas(64) float tile[kMaxCallRows * kManyRowsPanels * kMaxPanelWidth];
  static_assert(kFewRows * kMaxGroupPanels <= kMaxCallRows * kManyRowsPanels);
  const Part& part = task.part;
  const std::byte* inputs = (part.is_encoded ? encoded : widened) + part.input_at;
  const size_t stride = part.is_encoded ? encoded_stride : widened_stride;
  const auto num_tiles = static_cast<uint32_t>(divide_up(task.rows.size, kMaxCallRows));
  for (uint32_t t = 0; t < num_tiles; ++t) {
    const RowRange range = even_range(task.rows, num_tiles, t);
    const void* pointers[kMaxCallRows];
    for (uint32_t i = 0; i < range.size; ++i) pointers[i] = inputs + (range.begin + i) * stride;
    // Few rows take all panels in one pass; many take a few, so that the tile stays in a near
    // cache.
    const uint32_t at_once = range.size <= kFewRows ? panels.num_panels : kManyRowsPanels;
    for (uint32_t p = 0; p < panels.num_panels; p += at_once) {
      PanelRun pass = panels;
      pass.first += p * panels.panel_bytes;
      pass.num_panels = std::min(at_once, panels.num_panels - p);
      if (pass.bias != nullptr) pass.bias += size_t{p} * part.kernels->panel_width;
      part.kernels->multiply(range.size, pass, pointers, tile);
      finish(task, range, task.first_panel + p, pass.num_panels, tile);
    }
  }
}

void PackedLinear::Call::finish(const Task& task, RowRange tile_rows, uint32_t first_panel,
                                uint32_t num_panels, float* tile) const {
  const Part& part = task.part;
  const uint32_t width = part.kernels->panel_width;
  const size_t stride = size_t{num_panels} * width;
  const size_t columns = std::min(stride, part.outputs - size_t{first_panel} * width);
  const uint32_t first_column = part.first_output + first_panel * width;
  const size_t first_row = size_t{portion.begin} + tile_rows.begin;
  for (uint32_t m = 0; residual != nullptr && m < tile_rows.size; ++m) {
    widen_add(residual->dtype,
              residual->data + (first_row + m) * residual->stride_bytes +
                  first_column * dtype_bytes(residual->dtype),
              tile + m * stride, columns);
  }
  part.kernels->canonicalize_nan(tile, stride * tile_rows.size);
  for (uint32_t m = 0; m < tile_rows.size; ++m) {
    const float* sums = tile + m * stride;
    std::byte* to =
        out.data + (first_row + m) * out.stride_bytes + first_column * dtype_bytes(out.dtype);
    if (convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums), out.dtype, to, columns))
      continue;
    overflow.keep(static_cast<uint32_t>(first_row + m), first_column, {sums, columns}, out.dtype);
  }
}

// Runs the tasks of all calls as one job.
void PackedLinear::run_tasks(ThreadPool& pool, std::span<const Call> calls) {
  uint64_t num_tasks = 0;
  for (const Call& call : calls) num_tasks += call.num_tasks();
  const auto find = [&](uint64_t number) {
    const Call* call = calls.data();
    for (; number >= call->num_tasks(); ++call) number -= call->num_tasks();
    return std::pair(call, call->task_of(number));
  };
  pool.run(num_tasks, [&](uint64_t number) {
    const auto [call, task] = find(number);
    PanelRun panels = call->panels_of(task);
    const uint64_t next = number + pool.num_threads();  // most likely this thread's next task
    if (next < num_tasks) {
      const auto [next_call, next_task] = find(next);
      panels.next = next_call->panels_of(next_task).first;
    }
    call->multiply(task, panels);
  });
}

FirstReads PackedLinear::first_reads(uint32_t num_rows, uint32_t num_threads,
                                     size_t all_bytes) const {
  const Part& part = parts_.front();
  const size_t wanted_bytes = bytes_per_task(all_bytes, num_threads);
  return {panels_.data(), panels_per_group(part, num_rows, wanted_bytes) * part.panel_bytes};
}

Status PackedLinear::run(ThreadPool& pool, ScratchBlock& scratch, const RowsView& rows,
                         const RowsTarget& out, const RowsView* residual) const {
  const LinearProduct product{this, out, residual};
  return run_together(pool, scratch, rows, {&product, 1});
}

Status PackedLinear::run_together(ThreadPool& pool, ScratchBlock& scratch, const RowsView& rows,
                                  std::span<const LinearProduct> products) {
  const auto widened_bytes = [](const PackedLinear& linear) {
    return padded_bytes(sizeof(float) * linear.row_width_);
  };
  const auto encoded_bytes = [](const PackedLinear& linear) {
    return linear.encoded_bytes_ == 0 ? 0 : padded_bytes(linear.encoded_bytes_);
  };
  size_t row_bytes = 0, all_bytes = 0;
  uint64_t multiply_adds = 0;
  for (const LinearProduct& product : products) {
    DFLASH_TRY(check_linear_rows(rows, product.out, product.residual));
    row_bytes += widened_bytes(*product.linear) + encoded_bytes(*product.linear);
    all_bytes += product.linear->panels_.num_bytes();
    multiply_adds += uint64_t{rows.num_rows} * product.linear->inputs_ * product.linear->outputs_;
  }
  if (products.empty()) return ok();
  const PackedLinear& first = *products.front().linear;
  OperatorScope scope(Operator::kLinear, &first);
  scope.count(all_bytes, multiply_adds, numerics_name(first.numerics(0)));
  const CanonicalFloatMode mode;
  const auto most =
      static_cast<uint32_t>(std::clamp<size_t>(kMaxScratchBytes / row_bytes, 1, UINT32_MAX));
  const auto num_portions = static_cast<uint32_t>(divide_up(rows.num_rows, most));
  std::vector<FirstOverflow> overflows(products.size());
  std::vector<Call> calls;
  calls.reserve(products.size());
  for (uint32_t p = 0; p < num_portions; ++p) {
    const RowRange portion = even_range({0, rows.num_rows}, num_portions, p);
    auto room = scratch.room_for(portion.size * row_bytes);
    if (!room.ok()) return std::move(room).error();
    std::byte* at = room.value();
    calls.clear();
    for (size_t i = 0; i < products.size(); ++i) {
      const LinearProduct& product = products[i];
      const size_t widened = widened_bytes(*product.linear);
      const size_t encoded = encoded_bytes(*product.linear);
      calls.push_back({.linear = *product.linear,
                       .pool = pool,
                       .rows = rows,
                       .out = product.out,
                       .residual = product.residual,
                       .portion = portion,
                       .overflow = overflows[i],
                       .widened_stride = widened,
                       .encoded_stride = encoded,
                       .widened = at,
                       .encoded = at + portion.size * widened,
                       .groups = {}});
      at += portion.size * (widened + encoded);
      calls.back().encode_rows();
      calls.back().plan(all_bytes);
    }
    run_tasks(pool, calls);
  }
  for (FirstOverflow& overflow : overflows) DFLASH_TRY(overflow.take());
  return ok();
}

}  // namespace dflash::compute
