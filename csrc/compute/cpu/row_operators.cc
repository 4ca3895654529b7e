// The portable half of the row operators: checks, dtypes, the layout of rotary pairs, and threads.
// Rows of another dtype than float32 are widened into scratch of the task that owns them.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/row_operators.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
#include "compute/cpu/row_kernel_set.h"
#include "compute/operators/argmax.h"
#include "compute/operators/gating.h"

namespace dflash::compute {
namespace {

// Values that a task must have at least. A norm passes four of them per nanosecond, so that a task
// takes 64 us. Where the pool's threads sleep, two tasks of 60 us end on two threads when they end
// on one, and shorter ones later (measured on 2 shared cores of an AMD EPYC).
constexpr uint64_t kTaskValues = uint64_t{1} << 18;
// What choosing experts costs per logit, in values of a norm (measured: 128 logits in 0.2 us).
constexpr uint64_t kRouteCost = 8;

Error invalid(const std::string& what) { return {ErrorCode::kInvalidArgument, what}; }

// Checks rows that are read. `what` names them.
Status check_rows(const char* what, const RowsView& rows, uint32_t num_rows) {
  const size_t size = dtype_bytes(rows.dtype);
  if (rows.num_rows != num_rows) {
    return invalid(std::string(what) + " has " + std::to_string(rows.num_rows) +
                   " rows, where the operator has " + std::to_string(num_rows));
  }
  if (num_rows != 0 && rows.data == nullptr) return invalid(std::string(what) + " has no address");
  if (reinterpret_cast<uintptr_t>(rows.data) % size != 0 || rows.stride_bytes % size != 0) {
    return invalid(std::string(what) + " must begin and step at multiples of " +
                   std::to_string(size) + " bytes");
  }
  return ok();
}

// Checks rows that are written, which must not share bytes.
Status check_target(const char* what, const RowsTarget& target, uint32_t num_rows, uint64_t width) {
  DFLASH_TRY(
      check_rows(what, {target.data, target.dtype, target.stride_bytes, num_rows}, num_rows));
  if (num_rows > 1 && target.stride_bytes < width * dtype_bytes(target.dtype)) {
    return invalid(std::string(what) + " steps by " + std::to_string(target.stride_bytes) +
                   " bytes, less than its rows have");
  }
  return ok();
}

Status check_width(uint32_t width) {
  if (width >= 1 && width <= kMaxArgmaxWidth) return ok();
  return invalid("a row has " + std::to_string(width) + " values; allowed: 1.." +
                 std::to_string(kMaxArgmaxWidth));
}

// Scratch that is not cleared, because whoever takes it writes it first.
using Scratch = std::unique_ptr<float[]>;
Scratch scratch(uint64_t count) { return std::make_unique_for_overwrite<float[]>(count); }

const std::byte* row_of(const RowsView& rows, uint64_t row) {
  return rows.data + row * rows.stride_bytes;
}

// A row in float32: the row itself, or its widened values in `space`.
const float* read_row(const RowsView& rows, uint64_t row, uint32_t width, float* space) {
  const std::byte* from = row_of(rows, row);
  if (rows.dtype == Dtype::kF32) return reinterpret_cast<const float*>(from);
  widen(rows.dtype, from, space, width);
  return space;
}

// Where a row of the target is computed: in its place if that is float32, else in `space`, from
// which write_row rounds it.
float* place_row(const RowsTarget& target, uint64_t row, float* space) {
  if (target.dtype != Dtype::kF32) return space;
  return reinterpret_cast<float*>(target.data + row * target.stride_bytes);
}
void write_row(const RowsTarget& target, uint64_t row, uint32_t width, const float* values) {
  std::byte* to = target.data + row * target.stride_bytes;
  if (reinterpret_cast<const std::byte*>(values) == to) return;
  convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values), target.dtype, to, width);
}

// Calls body(first, last) for runs of rows on the pool's threads. There is a run for each
// kTaskValues values of all rows together (a row has `row_values`), one at least, and at most one
// for each row.
template <class Body>
void over_rows(ThreadPool& pool, uint32_t num_rows, uint64_t row_values, const Body& body) {
  if (num_rows == 0) return;
  const CanonicalFloatMode mode;
  const uint64_t num_tasks = std::clamp<uint64_t>(num_rows * row_values / kTaskValues, 1, num_rows);
  pool.run(num_tasks, [&](uint64_t task) {
    body(num_rows * task / num_tasks, num_rows * (task + 1) / num_tasks);
  });
}

}  // namespace

const RowKernels& row_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx2:       return kAvx2Rows;
    case Isa::kAvx512:
    case Isa::kAvx512Vnni:
    case Isa::kAvx512Bf16: return kAvx512Rows;
#elif defined(__aarch64__)
    case Isa::kNeon:
    case Isa::kNeonDotprod:
    case Isa::kNeonI8mm:
    case Isa::kNeonBf16:    return kNeonRows;
#endif
    default: return kScalarRows;
  }
}

Status normalize(ThreadPool& pool, Isa isa, const NormArgs& args) {
  const OperatorScope scope(Operator::kNorm);
  const uint32_t num_rows = args.rows.num_rows, width = args.width;
  const bool has_residual = args.residual.data != nullptr, keeps_sum = args.sum.data != nullptr;
  DFLASH_TRY(check_width(width));
  DFLASH_TRY(check_rows("rows", args.rows, num_rows));
  if (has_residual) DFLASH_TRY(check_rows("residual", args.residual, num_rows));
  if (keeps_sum) DFLASH_TRY(check_target("sum", args.sum, num_rows, width));
  DFLASH_TRY(check_target("out", args.out, num_rows, width));
  if (args.form.normalizes_rounded_sum && !keeps_sum)
    return invalid("a norm of the rounded sum needs a place for the sum");
  const RowKernels& kernels = row_kernels(isa);
  const auto kernel = args.form.kind == NormKind::kRms ? kernels.rms_norm : kernels.layer_norm;
  over_rows(pool, num_rows, width, [&](uint64_t first, uint64_t last) {
    const Scratch sums = scratch(width), results = scratch(width);
    for (uint64_t row = first; row < last; ++row) {
      const float* x = read_row(args.rows, row, width, sums.get());
      if (has_residual) {
        if (x != sums.get()) std::memcpy(sums.get(), x, sizeof(float) * width);
        widen_add(args.residual.dtype, row_of(args.residual, row), sums.get(), width);
        x = sums.get();
      }
      if (keeps_sum) {
        write_row(args.sum, row, width, x);
        const RowsView kept = {args.sum.data, args.sum.dtype, args.sum.stride_bytes, num_rows};
        if (args.form.normalizes_rounded_sum) x = read_row(kept, row, width, sums.get());
      }
      float* out = place_row(args.out, row, results.get());
      kernel({.form = args.form,
              .x = x,
              .weight = args.weight,
              .bias = args.bias,
              .out = out,
              .width = width});
      write_row(args.out, row, width, out);
    }
  });
  return ok();
}

namespace {

Status check_rotary(const RotaryForm& form) {
  DFLASH_TRY(check_width(form.head_dim));
  if (form.num_heads < 1 || form.num_heads > kMaxArgmaxWidth / form.head_dim)
    return invalid("num_heads is " + std::to_string(form.num_heads) + ", which cannot be");
  if (form.rotary_dim % 2 != 0 || form.rotary_offset > form.head_dim ||
      form.rotary_dim > form.head_dim - form.rotary_offset) {
    return invalid("rotary_dim " + std::to_string(form.rotary_dim) + " from " +
                   std::to_string(form.rotary_offset) + " on does not fit pairs into heads of " +
                   std::to_string(form.head_dim));
  }
  return ok();
}

// The rotation of one row's heads: its cosines and sines for both values of a pair, and scratch.
class HeadRotation {
 public:
  HeadRotation(const RotateArgs& args, void (*kernel)(const RotaryPairs&))
      : args_(args),
        kernel_(kernel),
        pairs_(args.form.rotary_dim / 2),
        space_(scratch(uint64_t{8} * pairs_)) {}

  void begin_row(uint64_t row) {
    const auto* cos = reinterpret_cast<const float*>(row_of(args_.cos, row));
    const auto* sin = reinterpret_cast<const float*>(row_of(args_.sin, row));
    tables_.first_cos = tables_.second_cos = cos;
    tables_.first_sin = tables_.second_sin = sin;
    if (!args_.form.has_full_tables) return;
    if (args_.form.layout == RotaryLayout::kInterleaved) {
      split(cos, part(4), part(5));
      split(sin, part(6), part(7));
      tables_.first_cos = part(4), tables_.second_cos = part(5);
      tables_.first_sin = part(6), tables_.second_sin = part(7);
    } else {
      tables_.second_cos += pairs_, tables_.second_sin += pairs_;
    }
  }

  // Rotates the rotary_dim values at `from` and writes them to `to`, which may be `from`.
  void rotate(const std::byte* from, std::byte* to) {
    const RotaryLayout layout = args_.form.layout;
    const uint32_t dim = 2 * pairs_;
    const RowsView source = {from, args_.rows.dtype, 0, 1};
    const RowsTarget target = {to, args_.out.dtype, 0};
    RotaryPairs pairs = tables_;
    pairs.count = pairs_;
    const float* x = read_row(source, 0, dim, part(2));
    float* y = place_row(target, 0, part(2));
    if (layout == RotaryLayout::kHalves) {
      pairs.first = x, pairs.second = x + pairs_;
    } else {
      split(x, part(0), part(1));
      pairs.first = part(0), pairs.second = part(1);
    }
    const bool joins = layout == RotaryLayout::kInterleaved;
    pairs.first_out = joins ? part(0) : y;
    pairs.second_out = joins ? part(1) : y + pairs_;
    kernel_(pairs);
    for (uint32_t i = 0; joins && i < pairs_; ++i)
      y[2 * i] = pairs.first_out[i], y[2 * i + 1] = pairs.second_out[i];
    write_row(target, 0, dim, y);
  }

 private:
  float* part(uint32_t index) { return space_.get() + size_t{index} * pairs_; }
  void split(const float* values, float* even, float* odd) const {
    for (uint32_t i = 0; i < pairs_; ++i) even[i] = values[2 * i], odd[i] = values[2 * i + 1];
  }

  const RotateArgs& args_;
  void (*kernel_)(const RotaryPairs&);
  const uint32_t pairs_;
  // Eight runs of pairs_ floats: even and odd values, a whole head (two runs), split tables.
  const Scratch space_;
  RotaryPairs tables_ = {};
};

}  // namespace

Status rotate(ThreadPool& pool, Isa isa, const RotateArgs& args) {
  const OperatorScope scope(Operator::kRotary);
  const RotaryForm& form = args.form;
  DFLASH_TRY(check_rotary(form));
  const uint32_t num_rows = args.rows.num_rows, width = form.num_heads * form.head_dim;
  DFLASH_TRY(check_rows("rows", args.rows, num_rows));
  DFLASH_TRY(check_rows("cos", args.cos, num_rows));
  DFLASH_TRY(check_rows("sin", args.sin, num_rows));
  DFLASH_TRY(check_target("out", args.out, num_rows, width));
  if (args.cos.dtype != Dtype::kF32 || args.sin.dtype != Dtype::kF32)
    return invalid("cosines and sines are float32");
  const size_t in = dtype_bytes(args.rows.dtype), out = dtype_bytes(args.out.dtype);
  const uint32_t begin = form.rotary_offset, end = begin + form.rotary_dim;
  const bool copies = args.rows.data != args.out.data;
  over_rows(pool, num_rows, width, [&](uint64_t first, uint64_t last) {
    HeadRotation rotation(args, row_kernels(isa).rotate);
    for (uint64_t row = first; row < last; ++row) {
      rotation.begin_row(row);
      for (uint32_t head = 0; head < form.num_heads; ++head) {
        const size_t at = size_t{head} * form.head_dim;
        const std::byte* from = row_of(args.rows, row) + at * in;
        std::byte* to = args.out.data + row * args.out.stride_bytes + at * out;
        rotation.rotate(from + begin * in, to + begin * out);
        if (!copies) continue;
        convert(args.rows.dtype, from, args.out.dtype, to, begin);
        convert(args.rows.dtype, from + end * in, args.out.dtype, to + end * out,
                form.head_dim - end);
      }
    }
  });
  return ok();
}

namespace {

Status check_router(const RouterForm& form) {
  const auto bound = [](const char* field, uint32_t value, uint32_t most) -> Status {
    if (value >= 1 && value <= most) return ok();
    return invalid(std::string("the router's ") + field + " is " + std::to_string(value) +
                   "; allowed: 1.." + std::to_string(most));
  };
  DFLASH_TRY(bound("num_experts", form.num_experts, kMaxRouterExperts));
  DFLASH_TRY(bound("top_k", form.top_k, form.num_experts));
  DFLASH_TRY(bound("num_groups", form.num_groups, kMaxRouterGroups));
  DFLASH_TRY(bound("topk_groups", form.topk_groups, form.num_groups));
  if (form.num_groups == 1) return ok();
  const uint32_t least = form.group_score == GroupScore::kTopTwoSum ? 2 : 1;
  if (form.num_experts % form.num_groups == 0 && form.num_experts / form.num_groups >= least)
    return ok();
  return invalid(std::to_string(form.num_experts) + " experts do not make " +
                 std::to_string(form.num_groups) + " equal groups of at least " +
                 std::to_string(least));
}

void write_ids(const RouteArgs& args, uint64_t row, const uint32_t* ids) {
  const uint64_t first = row * args.form.top_k;
  for (uint32_t i = 0; i < args.form.top_k; ++i) {
    if (args.id_type == IdType::kInt64)
      reinterpret_cast<int64_t*>(args.topk_ids)[first + i] = ids[i];
    else
      reinterpret_cast<int32_t*>(args.topk_ids)[first + i] = static_cast<int32_t>(ids[i]);
  }
}

}  // namespace

Status route(ThreadPool& pool, Isa isa, const RouteArgs& args) {
  const OperatorScope scope(Operator::kRoute);
  const RouterForm& form = args.form;
  const uint32_t num_rows = args.logits.num_rows, num_experts = form.num_experts;
  const size_t id_bytes = args.id_type == IdType::kInt64 ? 8 : 4;
  DFLASH_TRY(check_router(form));
  DFLASH_TRY(check_rows("logits", args.logits, num_rows));
  if (num_rows != 0 && (args.topk_ids == nullptr || args.topk_weights == nullptr ||
                        reinterpret_cast<uintptr_t>(args.topk_ids) % id_bytes != 0)) {
    return invalid("topk_ids and topk_weights need aligned addresses");
  }
  over_rows(pool, num_rows, kRouteCost * num_experts, [&](uint64_t first, uint64_t last) {
    const Scratch space = scratch(uint64_t{3} * num_experts);
    const auto ids = std::make_unique_for_overwrite<uint32_t[]>(form.top_k);
    for (uint64_t row = first; row < last; ++row) {
      row_kernels(isa).route({.form = &form,
                              .logits = read_row(args.logits, row, num_experts, space.get()),
                              .bias = args.bias,
                              .expert_scales = args.expert_scales,
                              .scores = space.get() + num_experts,
                              .choice = space.get() + uint64_t{2} * num_experts,
                              .topk_ids = ids.get(),
                              .topk_weights = args.topk_weights + row * form.top_k});
      write_ids(args, row, ids.get());
    }
  });
  return ok();
}

Status apply_gate(ThreadPool& pool, Isa isa, const GateArgs& args) {
  const OperatorScope scope(Operator::kActivation);
  const uint32_t num_rows = args.up.num_rows, width = args.width;
  const bool has_gate = args.spec.gate != GateKind::kNone;
  DFLASH_TRY(check_width(width));
  DFLASH_TRY(check_rows("up", args.up, num_rows));
  if (has_gate) DFLASH_TRY(check_rows("gate", args.gate, num_rows));
  DFLASH_TRY(check_target("out", args.out, num_rows, width));
  over_rows(pool, num_rows, width, [&](uint64_t first, uint64_t last) {
    const Scratch gates = scratch(width), ups = scratch(width);
    for (uint64_t row = first; row < last; ++row) {
      const float* g = has_gate ? read_row(args.gate, row, width, gates.get()) : nullptr;
      const float* u = read_row(args.up, row, width, ups.get());
      float* out = place_row(args.out, row, ups.get());
      row_kernels(isa).gate(args.spec, g, u, out, width);
      write_row(args.out, row, width, out);
    }
  });
  return ok();
}

Status add_scaled(ThreadPool& pool, Isa isa, const AddScaledArgs& args) {
  const OperatorScope scope(Operator::kAdd);
  const uint32_t num_rows = args.rows.num_rows, width = args.width;
  const bool has_base = args.base.data != nullptr, has_gate = args.gate.data != nullptr;
  DFLASH_TRY(check_width(width));
  DFLASH_TRY(check_rows("rows", args.rows, num_rows));
  if (has_base) DFLASH_TRY(check_rows("base", args.base, num_rows));
  if (has_gate) DFLASH_TRY(check_rows("gate", args.gate, num_rows));
  DFLASH_TRY(check_target("out", args.out, num_rows, width));
  over_rows(pool, num_rows, width, [&](uint64_t first, uint64_t last) {
    const Scratch values = scratch(width), bases = scratch(width);
    float gate = 0.0f;
    for (uint64_t row = first; row < last; ++row) {
      ScaledRow scaled = {.x = read_row(args.rows, row, width, values.get()),
                          .base = nullptr,
                          .gate = nullptr,
                          .scale = args.scale,
                          .out = place_row(args.out, row, values.get()),
                          .width = width};
      if (has_base) scaled.base = read_row(args.base, row, width, bases.get());
      if (has_gate) scaled.gate = read_row(args.gate, row, 1, &gate);
      row_kernels(isa).add_scaled(scaled);
      write_row(args.out, row, width, scaled.out);
    }
  });
  return ok();
}

Status argmax(ThreadPool& pool, Isa isa, uint32_t width, const RowsView& rows, int64_t* places) {
  const OperatorScope scope(Operator::kArgmax);
  DFLASH_TRY(check_width(width));
  DFLASH_TRY(check_rows("rows", rows, rows.num_rows));
  if (rows.num_rows != 0 && places == nullptr) return invalid("places have no address");
  over_rows(pool, rows.num_rows, width, [&](uint64_t first, uint64_t last) {
    const Scratch space = scratch(rows.dtype == Dtype::kF32 ? 0 : width);
    for (uint64_t row = first; row < last; ++row)
      places[row] = row_kernels(isa).argmax(read_row(rows, row, width, space.get()), width);
  });
  return ok();
}

}  // namespace dflash::compute
