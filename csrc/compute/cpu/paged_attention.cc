// Runs the tasks of a step's attention. A thread has memory of its own for the rows it works on.
// Where several tasks share the tiles of a group, whichever ends last merges them, in order.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/paged_attention.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
#include "compute/cpu/attention_kernels.h"
#include "compute/cpu/attention_split.h"
#include "compute/numerics.h"

namespace dflash::compute {

const AttentionKernels& attention_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:       return kAvx2Attention;
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
    case Isa::kAvx512Bf16: return kAvx512Attention;
#elif defined(__aarch64__)
    case Isa::kNeon:
    case Isa::kNeonDotprod:
    case Isa::kNeonI8mm:
    case Isa::kNeonBf16:    return kNeonAttention;
#endif
    default: return kScalarAttention;
  }
}

namespace {

// Makes a buffer at least that large. What it held is lost.
Status grow(PageBuffer& buffer, size_t num_floats) {
  const size_t bytes = num_floats * sizeof(float);
  if (buffer.num_bytes() >= bytes) return ok();
  auto larger = PageBuffer::create(bytes);
  if (!larger.ok()) return std::move(larger).error();
  buffer = std::move(larger).value();
  return ok();
}

// The memory of one thread, cut for groups of up to `max_rows` rows.
struct ThreadRows {
  float* queries;  // [max_rows][key_size]
  float* scores;   // [max_rows][kTileTokens]
  float* outputs;  // [max_rows][value_stride]
  AttentionState state;

  static size_t lines(size_t num_floats) { return (num_floats + 15) / 16 * 16; }
  static size_t num_floats(const KvShape& shape, uint32_t max_rows) {
    return lines(size_t{max_rows} * shape.key_size) + size_t{max_rows} * kTileTokens +
           2 * size_t{max_rows} * shape.value_stride() + 2 * lines(max_rows);
  }
  ThreadRows(float* memory, const KvShape& shape, uint32_t max_rows) {
    const auto take = [&](size_t count) {
      float* taken = memory;
      memory += lines(count);
      return taken;
    };
    queries = take(size_t{max_rows} * shape.key_size);
    scores = take(size_t{max_rows} * kTileTokens);
    outputs = take(size_t{max_rows} * shape.value_stride());
    state.outputs = take(size_t{max_rows} * shape.value_stride());
    state.largest = take(max_rows);
    state.sums = take(max_rows);
  }
};

class AttentionCall {
 public:
  AttentionCall(const AttentionKernels& kernels, const KvView& kv, const AttentionPlan& plan,
                const AttentionForm& form, uint32_t num_heads, const RowsView& queries,
                const RowsTarget& out)
      : kernels_(kernels),
        kv_(kv),
        plan_(plan),
        form_(form),
        num_heads_(num_heads),
        heads_per_kv_(num_heads / kv.shape.num_kv_heads),
        queries_(queries),
        out_(out) {}

  Status run(ThreadPool& pool, AttentionScratch& scratch);
  // Adds the keys and values that rows see, and their products, to what the clock counts.
  void count_work(OperatorScope& scope) const;

 private:
  void run_task(const AttentionTask& task, const ThreadRows& rows);
  void load_queries(const RowGroup& group, const ThreadRows& rows) const;
  void attend(const RowGroup& group, uint32_t tile, const ThreadRows& rows,
              const AttentionState& state) const;
  void find_blocks(const RowGroup& group, uint32_t tile, AttentionTile& args) const;
  void finish(const RowGroup& group, const AttentionState& state);
  AttentionState partial(const RowGroup& group, uint32_t tile) const;

  const AttentionKernels& kernels_;
  const KvView& kv_;
  const AttentionPlan& plan_;
  const AttentionForm& form_;
  const uint32_t num_heads_;
  const uint32_t heads_per_kv_;
  const RowsView& queries_;
  const RowsTarget& out_;
  AttentionSplit split_;
  float* partials_ = nullptr;
  // Tasks of each group that have not ended. Its decrement publishes the states they wrote.
  std::vector<std::atomic<uint32_t>> num_pending_;
  // The first row that exceeded the range; relaxed, because it is read after the run, whose end
  // synchronises.
  std::atomic<uint32_t> first_bad_row_{UINT32_MAX};
};

void AttentionCall::count_work(OperatorScope& scope) const {
  const KvShape& shape = kv_.shape;
  uint64_t num_keys = 0, num_pairs = 0;  // pairs of a row and a key that it sees
  for (const AttentionPlan::Sequence& sequence : plan_.sequences()) {
    const uint32_t end = sequence.first_position + sequence.num_rows;
    num_keys += end - first_visible(sequence.first_position, form_.window);
    for (uint32_t position = sequence.first_position; position < end; ++position)
      num_pairs += position + 1 - first_visible(position, form_.window);
  }
  const size_t block_bytes = shape.key_block_bytes() + shape.value_block_bytes();
  scope.count(num_keys * shape.num_kv_heads * block_bytes / kBlockTokens,
              num_pairs * num_heads_ * (shape.key_size + shape.value_size),
              numerics_name(NumericsClass::kF32Canonical));
}

Status AttentionCall::run(ThreadPool& pool, AttentionScratch& scratch) {
  const KvShape& shape = kv_.shape;
  split_ = split_attention(plan_, shape, form_, num_heads_, pool.num_threads());
  const size_t thread_floats = ThreadRows::num_floats(shape, split_.max_rows);
  DFLASH_TRY(grow(scratch.threads, thread_floats * pool.num_threads()));
  DFLASH_TRY(grow(scratch.partials, split_.num_partials));
  float* threads = reinterpret_cast<float*>(scratch.threads.data());
  partials_ = reinterpret_cast<float*>(scratch.partials.data());
  num_pending_ = std::vector<std::atomic<uint32_t>>(split_.groups.size());
  for (size_t g = 0; g < split_.groups.size(); ++g)
    num_pending_[g].store(split_.groups[g].num_tasks, std::memory_order_relaxed);
  pool.run_on_threads(split_.tasks.size(), [&](uint64_t task, uint32_t thread) {
    run_task(split_.tasks[task],
             ThreadRows(threads + thread * thread_floats, shape, split_.max_rows));
  });
  const uint32_t bad = first_bad_row_.load(std::memory_order_relaxed);
  if (bad == UINT32_MAX) return ok();
  ErrorPlace place;
  place.token = bad;
  return Error{
      ErrorCode::kRange,
      "row " + std::to_string(bad) + " of attention exceeds the range of " + dtype_name(out_.dtype)}
      .at(place);
}

void AttentionCall::run_task(const AttentionTask& task, const ThreadRows& rows) {
  const RowGroup& group = split_.groups[task.group];
  const uint32_t stride = kv_.shape.value_stride();
  load_queries(group, rows);
  const uint32_t end = task.first_tile + task.num_tiles;
  std::fill_n(rows.state.sums, group.size(), 0.0f);
  if (group.num_tasks == 1) {
    for (uint32_t tile = task.first_tile; tile < end; ++tile) attend(group, tile, rows, rows.state);
    return finish(group, rows.state);
  }
  for (uint32_t tile = task.first_tile; tile < end; ++tile) {
    const AttentionState state = partial(group, tile);
    std::fill_n(state.sums, group.size(), 0.0f);
    attend(group, tile, rows, state);
  }
  if (num_pending_[task.group].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  for (uint32_t tile = group.first_tile; tile < group.first_tile + group.num_tiles; ++tile)
    kernels_.merge(partial(group, tile), group.size(), stride, rows.state);
  finish(group, rows.state);
}

AttentionState AttentionCall::partial(const RowGroup& group, uint32_t tile) const {
  const uint32_t stride = kv_.shape.value_stride();
  float* outputs = partials_ + group.first_partial +
                   state_floats(group.size(), stride) * (tile - group.first_tile);
  float* largest = outputs + size_t{group.size()} * stride;
  return {largest, largest + group.size(), outputs};
}

void AttentionCall::load_queries(const RowGroup& group, const ThreadRows& rows) const {
  const size_t key_size = kv_.shape.key_size,
               first_row = plan_.sequences()[group.sequence].first_row;
  for (uint32_t r = 0; r < group.num_rows; ++r) {
    widen(queries_.dtype,
          queries_.data + (first_row + group.first_row + r) * queries_.stride_bytes +
              group.first_head * key_size * dtype_bytes(queries_.dtype),
          rows.queries + r * group.num_heads * key_size, group.num_heads * key_size);
  }
}

void AttentionCall::find_blocks(const RowGroup& group, uint32_t tile, AttentionTile& args) const {
  const AttentionPlan::Sequence& sequence = plan_.sequences()[group.sequence];
  const int32_t* table = plan_.block_table(sequence);
  const uint32_t kv_head = group.first_head / heads_per_kv_;
  const uint32_t num_blocks =
      (sequence.first_position + group.first_row + group.num_rows - 1) / kBlockTokens + 1;
  const uint32_t first = tile * kTileBlocks;
  for (uint32_t b = 0; b < kTileBlocks && first + b < num_blocks; ++b) {
    const uint32_t block = static_cast<uint32_t>(table[first + b]);
    args.key_blocks[b] = kv_.key_block(block, kv_head);
    args.value_blocks[b] = kv_.value_block(block, kv_head);
  }
  for (uint32_t b = 0; b < kAheadBlocks && first + kTileBlocks + b < num_blocks; ++b) {
    args.next_blocks[b] =
        kv_.key_block(static_cast<uint32_t>(table[first + kTileBlocks + b]), kv_head);
  }
}

void AttentionCall::attend(const RowGroup& group, uint32_t tile, const ThreadRows& rows,
                           const AttentionState& state) const {
  const float* queries[kMaxAttentionRows];
  KeyRange ranges[kMaxAttentionRows];
  const uint32_t first = plan_.sequences()[group.sequence].first_position + group.first_row;
  const auto within = [&](uint32_t position) {  // a position as a key of the tile
    return std::min(std::max(position, tile * kTileTokens) - tile * kTileTokens, kTileTokens);
  };
  for (uint32_t m = 0; m < group.size(); ++m) {
    const uint32_t position = first + m / group.num_heads;
    queries[m] = rows.queries + size_t{m} * kv_.shape.key_size;
    ranges[m] = {within(first_visible(position, form_.window)), within(position + 1)};
  }
  AttentionTile args{};
  find_blocks(group, tile, args);
  args.key_size = kv_.shape.key_size;
  args.value_stride = kv_.shape.value_stride();
  args.form = &form_;
  args.num_rows = group.size();
  args.queries = queries;
  args.ranges = ranges;
  args.state = state;
  args.scores = rows.scores;
  args.outputs = rows.outputs;
  kernels_.attend[static_cast<uint8_t>(kv_.shape.dtype)](args);
}

void AttentionCall::finish(const RowGroup& group, const AttentionState& state) {
  const KvShape& shape = kv_.shape;
  const uint32_t first_row = plan_.sequences()[group.sequence].first_row + group.first_row;
  for (uint32_t r = 0; r < group.num_rows; ++r) {
    const uint32_t m = r * group.num_heads;
    const AttentionState row{state.largest + m, state.sums + m,
                             state.outputs + size_t{m} * shape.value_stride()};
    kernels_.finish(row, group.num_heads, shape.value_stride(),
                    form_.sinks == nullptr ? nullptr : form_.sinks + group.first_head);
    std::byte* to = out_.data + (size_t{first_row} + r) * out_.stride_bytes;
    for (uint32_t h = 0; h < group.num_heads; ++h) {
      const size_t column = size_t{group.first_head + h} * shape.value_size;
      const float* outputs = row.outputs + size_t{h} * shape.value_stride();
      if (convert(Dtype::kF32, reinterpret_cast<const std::byte*>(outputs), out_.dtype,
                  to + column * dtype_bytes(out_.dtype), shape.value_size)) {
        continue;
      }
      uint32_t bad = first_bad_row_.load(std::memory_order_relaxed);
      while (first_row + r < bad &&
             !first_bad_row_.compare_exchange_weak(bad, first_row + r, std::memory_order_relaxed)) {
      }
    }
  }
}

Status check_arguments(const KvShape& shape, const AttentionPlan& plan, const AttentionForm& form,
                       uint32_t num_heads, const RowsView& queries) {
  std::string wrong;
  if (num_heads == 0 || num_heads % shape.num_kv_heads != 0) {
    wrong = std::to_string(num_heads) + " query heads are no multiple of " +
            std::to_string(shape.num_kv_heads) + " kv heads";
  } else if (queries.num_rows != plan.num_rows()) {
    wrong = "there are " + std::to_string(queries.num_rows) + " queries for a plan of " +
            std::to_string(plan.num_rows()) + " rows";
  } else if (plan.max_block() >= static_cast<int64_t>(shape.num_blocks)) {
    wrong = "the plan has block " + std::to_string(plan.max_block()) + "; the layer has " +
            std::to_string(shape.num_blocks);
  } else if (!(form.softcap >= 0.0f)) {
    wrong = "softcap is " + std::to_string(form.softcap) + "; it is 0 or positive";
  }
  if (wrong.empty()) return ok();
  return Error{ErrorCode::kInvalidArgument, wrong};
}

}  // namespace

Status paged_attention(ThreadPool& pool, Isa isa, const KvView& kv, const AttentionPlan& plan,
                       const AttentionForm& form, uint32_t num_heads, const RowsView& queries,
                       const RowsTarget& out, AttentionScratch& scratch) {
  DFLASH_TRY(check_arguments(kv.shape, plan, form, num_heads, queries));
  if (plan.num_rows() == 0) return ok();
  OperatorScope scope(Operator::kAttention);
  const CanonicalFloatMode mode;
  AttentionCall call(attention_kernels(isa), kv, plan, form, num_heads, queries, out);
  if (scope.is_clocked()) call.count_work(scope);
  return call.run(pool, scratch);
}

}  // namespace dflash::compute
