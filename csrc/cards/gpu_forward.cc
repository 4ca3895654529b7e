// The forward of a GPU layer. Rows and lists go to the device in one copy, routing and the two
// projections run there, and the reply comes back in another copy. All offsets of a portion's
// scratch memory are known before anything is queued, so the host never waits for a list that is
// made on the device.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <string>

#include "cards/gpu_layer.h"
#include "cards/host_routing.h"
#include "cards/kernel_table.h"
#include "cards/record_layout.h"
#include "compute/experts/layer_checks.h"

namespace dflash::compute::gpu {
namespace {

constexpr uint32_t kMaxPortionPairs = 65535;  // tiles are counted in a grid's second direction
constexpr uint32_t kElementThreads = 256;
constexpr uint32_t kRouteThreads = 256;
constexpr uint32_t kManyThreads = 128, kWgmmaThreads = 256;
constexpr uint32_t kMostFewSubgroups = 8;
constexpr uint32_t kCodesPerThread = 4;
constexpr uint32_t kHalfFewThreads = 256;

uint32_t divide_up(uint64_t value, uint64_t by) {
  return static_cast<uint32_t>((value + by - 1) / by);
}
uint32_t padded(uint32_t count, uint32_t to) { return (count + to - 1) / to * to; }

template <class T>
T* at(std::byte* device, uint64_t offset) {
  return reinterpret_cast<T*>(device + offset);
}

template <class Params>
Status launch(DeviceRuntime& runtime, KernelId kernel, uint32_t grid_x, uint32_t grid_y,
              uint32_t threads, const Params& params) {
  return runtime.launch({kernel, grid_x, grid_y, threads, &params, sizeof(params)});
}

// The threads of a few-row block: as many sub-groups as there are chains, at most
// kMostFewSubgroups, in whole blocks of 64 threads.
uint32_t few_threads(uint32_t inputs) {
  const uint32_t subgroups = std::min(num_chains(inputs), kMostFewSubgroups);
  return (subgroups + 1) / 2 * 64;
}

// How a class launches a projection: by its few-row and its many-row kernel, which give equal
// bits.
struct ProjectionKernels {
  KernelId few, many;
  uint32_t few_blocks, few_threads;  // blocks in grid_x, and threads per block
  uint32_t many_blocks, many_threads;
};

// A block of the bf16 few-row kernel has two panels, and a team per chain; a team is as many
// threads as execute together.
ProjectionKernels projection_kernels(InputRounding rounding, WeightFormat format,
                                     const ProjectionParams& params, uint32_t many_blocks,
                                     const DeviceFacts& facts) {
  if (rounding == InputRounding::kBf16) {
    const uint32_t threads =
        std::min(num_chains(params.num_inputs) * facts.wave_width, kHalfFewThreads);
    ProjectionKernels kernels{kernel_id(WeightKernel::k_bf16_few, format),
                              kernel_id(WeightKernel::k_bf16_many, format),
                              many_blocks,
                              padded(threads, 64),
                              many_blocks,
                              kManyThreads};
    if (!facts.has_warpgroups) return kernels;
    kernels.many = kernel_id(WeightKernel::k_bf16_wgmma, format);
    kernels.many_blocks = divide_up(many_blocks, 2);
    kernels.many_threads = kWgmmaThreads;
    return kernels;
  }
  const uint32_t panels = num_panels(params.num_outputs), threads = few_threads(params.num_inputs);
  if (rounding == InputRounding::kF16) {
    return {kernel_id(WeightKernel::k_dot2_few, format),
            kernel_id(WeightKernel::k_dot2_many, format),
            panels,
            threads,
            many_blocks,
            kManyThreads};
  }
  if (rounding == InputRounding::kInt8) {
    return {kernel_id(IntegerKernel::k_int8_few, format),
            kernel_id(IntegerKernel::k_int8_many, format),
            panels,
            threads,
            many_blocks,
            kManyThreads};
  }
  return {kernel_id(WeightKernel::k_project_few, format),
          kernel_id(WeightKernel::k_project_many, format),
          panels,
          threads,
          many_blocks,
          kManyThreads};
}

// The bytes of a row as the class reads it, where it computes with records of codes; else 0.
uint64_t code_row_bytes(InputRounding rounding, uint32_t inputs) {
  if (rounding == InputRounding::kInt8) return int8_row_bytes(inputs);
  return rounding == InputRounding::kF16 ? half_row_bytes(inputs) : 0;
}

Status launch_codes(DeviceRuntime& runtime, InputRounding rounding, const QuantizeParams& params) {
  const PlainKernel kernel =
      rounding == InputRounding::kInt8 ? PlainKernel::k_quantize_rows : PlainKernel::k_halve_rows;
  const uint64_t threads =
      uint64_t{params.num_rows} * num_chains(params.row_size) * (kChain / kCodesPerThread);
  return launch(runtime, kernel_id(kernel), divide_up(threads, kElementThreads), 1, kElementThreads,
                params);
}

}  // namespace

// A run of rows whose values fit the scratch bound.
struct GpuLayer::Portion {
  uint32_t first_row, num_rows, first_pair, num_pairs;
};

// Offsets of a portion's lists and values in scratch memory. The first `input_bytes` come from the
// host in one copy; the routing lists are among them where the host makes them (host_routing.h).
struct GpuLayer::Scratch {
  uint64_t num_bytes = 0;
  bool is_listed_at_host = false;
  uint64_t weights = 0, counts = 0, ids = 0, source = 0, input_bytes = 0;
  uint64_t row_begins = 0, pair_rows = 0, expert_counts = 0, slot_pairs = 0, pair_slots = 0,
           row_slots = 0;
  uint64_t num_tiles = 0, few_tiles = 0, many_tiles = 0;
  uint32_t most_few_tiles = 0, most_many_tiles = 0;
  uint64_t rows = 0, hidden = 0, downs = 0;
  // Where a class computes with codes: they are in place of the rows, and beside the intermediate
  // rows.
  uint64_t row_codes = 0, hidden_codes = 0;
  // Both come back in one copy, which begins at out_of_range.
  uint64_t out_of_range = 0, reply = 0, output_bytes = 0;
  uint32_t row_stride = 0, hidden_stride = 0;
  uint32_t few_tile_rows = kFewTileRows;
  uint64_t place(uint64_t bytes) {
    const uint64_t offset = num_bytes;
    num_bytes = (offset + bytes + 255) / 256 * 256;
    return offset;
  }
};

Status GpuLayer::forward(const ForwardArgs& args, YieldingProgress& progress) {
  DFLASH_TRY(check_batch(args, num_local_experts_));
  for (uint16_t id : args.local_expert_ids) {
    if (is_loaded_[id] == 0) {
      return Error{ErrorCode::kInvalidArgument, "local expert " + std::to_string(id) +
                                                    " was not loaded; load it before forward"};
    }
  }
  uint32_t row = 0, pair = 0;
  while (row < args.num_rows) {
    const Portion portion = next_portion(args, row, pair);
    DFLASH_TRY(forward_portion(args, portion, progress));
    row += portion.num_rows;
    pair += portion.num_pairs;
  }
  return ok();
}

GpuLayer::Portion GpuLayer::next_portion(const ForwardArgs& args, uint32_t first_row,
                                         uint32_t first_pair) const {
  const uint64_t pair_bytes = 4 * (uint64_t{spec_.intermediate_size} + spec_.out_size) +
                              code_row_bytes(numerics_.inputs, spec_.intermediate_size);
  const uint64_t row_bytes = 4 * (uint64_t{spec_.in_size} + spec_.out_size);
  Portion portion{first_row, 0, first_pair, 0};
  for (uint32_t row = first_row; row < args.num_rows; ++row) {
    const uint32_t pairs = args.row_counts[row];
    const uint64_t bytes =
        (portion.num_pairs + pairs) * pair_bytes + (portion.num_rows + 1) * row_bytes;
    if (portion.num_rows != 0 &&
        (portion.num_pairs + pairs > kMaxPortionPairs || bytes > device_->batch_bytes()))
      break;
    ++portion.num_rows;
    portion.num_pairs += pairs;
  }
  return portion;
}

GpuLayer::Scratch GpuLayer::place_scratch(const Portion& portion, const ForwardArgs& args) const {
  Scratch scratch;
  const uint64_t rows = portion.num_rows, pairs = portion.num_pairs;
  const bool has_halves = numerics_.inputs == InputRounding::kBf16;
  const uint64_t value_bytes = has_halves ? sizeof(uint16_t) : sizeof(float);
  scratch.row_stride = padded(spec_.in_size, has_halves ? 8 : 4);  // 16 bytes
  scratch.hidden_stride = padded(spec_.intermediate_size, has_halves ? 8 : 4);
  scratch.few_tile_rows = has_halves ? kHalfFewTileRows : kFewTileRows;
  scratch.most_few_tiles = static_cast<uint32_t>(std::min<uint64_t>(
      pairs, uint64_t{num_local_experts_} * (kMostFewPairs / scratch.few_tile_rows)));
  scratch.most_many_tiles = static_cast<uint32_t>(
      std::min<uint64_t>(pairs / (kMostFewPairs + 1), num_local_experts_ + pairs / kManyTileRows));
  scratch.is_listed_at_host = pairs <= kMostHostPairs;
  const auto place_lists = [&] {
    scratch.row_begins = scratch.place((rows + 1) * sizeof(uint32_t));
    scratch.pair_rows = scratch.place(pairs * sizeof(uint32_t));
    scratch.slot_pairs = scratch.place(pairs * sizeof(uint32_t));
    scratch.row_slots = scratch.place(pairs * sizeof(uint32_t));
    scratch.num_tiles = scratch.place(2 * sizeof(uint32_t));
    scratch.few_tiles = scratch.place(scratch.most_few_tiles * sizeof(Tile));
    scratch.many_tiles = scratch.place(scratch.most_many_tiles * sizeof(Tile));
  };
  scratch.weights = scratch.place(pairs * sizeof(float));
  if (scratch.is_listed_at_host) {
    place_lists();
  } else {
    scratch.counts = scratch.place(rows * sizeof(uint16_t));
    scratch.ids = scratch.place(pairs * sizeof(uint16_t));
  }
  scratch.source = scratch.place(rows * spec_.in_size * dtype_bytes(args.row_dtype));
  // The last of the inputs and the first of the outputs, so that it takes no operation of its own.
  scratch.out_of_range = scratch.place(sizeof(uint64_t));
  scratch.input_bytes = scratch.num_bytes;
  // Wide enough for the float32 sums of range_failure(), whatever the reply's dtype.
  scratch.reply = scratch.place(rows * spec_.out_size * sizeof(float));
  if (!scratch.is_listed_at_host) {
    place_lists();
    scratch.expert_counts = scratch.place(num_local_experts_ * sizeof(uint32_t));
    scratch.pair_slots = scratch.place(pairs * sizeof(uint32_t));
  }
  if (code_row_bytes(numerics_.inputs, 1) != 0) {
    scratch.row_codes = scratch.place(rows * code_row_bytes(numerics_.inputs, spec_.in_size));
    scratch.hidden_codes =
        scratch.place(pairs * code_row_bytes(numerics_.inputs, spec_.intermediate_size));
  } else {
    scratch.rows = scratch.place(rows * scratch.row_stride * value_bytes);
  }
  scratch.hidden = scratch.place(pairs * scratch.hidden_stride * value_bytes);
  scratch.downs = scratch.place(pairs * spec_.out_size * sizeof(float));
  scratch.output_bytes =
      scratch.reply - scratch.out_of_range + rows * spec_.out_size * dtype_bytes(args.reply_dtype);
  return scratch;
}

Status GpuLayer::forward_portion(const ForwardArgs& args, const Portion& portion,
                                 YieldingProgress& progress) {
  GpuDevice::Turn turn(*device_);
  Scratch scratch = place_scratch(portion, args);
  auto device = turn.scratch(scratch.num_bytes);
  if (!device.ok()) return std::move(device).error();
  auto host = turn.staging(std::max(scratch.input_bytes, scratch.output_bytes));
  if (!host.ok()) return std::move(host).error();
  DeviceRuntime& runtime = turn.runtime();
  if (scratch.is_listed_at_host) list_pairs(args, portion, scratch, host.value());
  DFLASH_TRY(queue_inputs(args, portion, scratch, device.value(), host.value(), runtime));
  if (portion.num_pairs != 0) {
    if (!scratch.is_listed_at_host)
      DFLASH_TRY(queue_routing(portion, scratch, device.value(), runtime));
    DFLASH_TRY(queue_projections(portion, scratch, device.value(), runtime));
  }
  const CombineParams combine = combine_params(portion, scratch, device.value(), args.reply_dtype);
  const uint32_t blocks = divide_up(uint64_t{portion.num_rows} * spec_.out_size, kElementThreads);
  DFLASH_TRY(
      launch(runtime, kernel_id(PlainKernel::k_combine), blocks, 1, kElementThreads, combine));
  DFLASH_TRY(runtime.mark(Mark::kEnd));
  DFLASH_TRY(
      runtime.copy_out(host.value(), device.value() + scratch.out_of_range, scratch.output_bytes));
  DFLASH_TRY(turn.drain(progress));
  const auto computed_ns = runtime.elapsed_ns();
  if (!computed_ns.ok()) return Error{computed_ns.error().code, computed_ns.error().message};
  device_ns_ += computed_ns.value();
  const uint64_t reply_row = uint64_t{spec_.out_size} * dtype_bytes(args.reply_dtype);
  std::memcpy(args.reply + portion.first_row * reply_row,
              host.value() + (scratch.reply - scratch.out_of_range), portion.num_rows * reply_row);
  uint64_t out_of_range;
  std::memcpy(&out_of_range, host.value(), sizeof(out_of_range));
  if (out_of_range == kInRange) return ok();
  return range_failure(args, portion, scratch, device.value(), out_of_range, turn, progress);
}

// Makes the lists of a small batch in staging memory. The grids then have exactly as many blocks as
// there are tiles.
void GpuLayer::list_pairs(const ForwardArgs& args, const Portion& portion, Scratch& scratch,
                          std::byte* host) const {
  const RoutingLists lists{
      at<uint32_t>(host, scratch.row_begins), at<uint32_t>(host, scratch.pair_rows),
      at<uint32_t>(host, scratch.slot_pairs), at<uint32_t>(host, scratch.row_slots),
      at<uint32_t>(host, scratch.num_tiles),  at<Tile>(host, scratch.few_tiles),
      at<Tile>(host, scratch.many_tiles),     scratch.few_tile_rows};
  list_at_host(args.row_counts.subspan(portion.first_row, portion.num_rows),
               args.local_expert_ids.subspan(portion.first_pair, portion.num_pairs),
               num_local_experts_, lists);
  scratch.most_few_tiles = lists.num_tiles[0];
  scratch.most_many_tiles = lists.num_tiles[1];
}

Status GpuLayer::queue_inputs(const ForwardArgs& args, const Portion& portion,
                              const Scratch& scratch, std::byte* device, std::byte* host,
                              DeviceRuntime& runtime) const {
  const uint64_t source_bytes =
                     uint64_t{portion.num_rows} * spec_.in_size * dtype_bytes(args.row_dtype),
                 none = kInRange;
  const std::byte* source =
      args.rows + portion.first_row * uint64_t{spec_.in_size} * dtype_bytes(args.row_dtype);
  if (portion.num_pairs != 0) {  // an empty span may be null
    std::memcpy(host + scratch.weights, args.weights.data() + portion.first_pair,
                portion.num_pairs * sizeof(float));
  }
  if (!scratch.is_listed_at_host) {
    std::memcpy(host + scratch.counts, args.row_counts.data() + portion.first_row,
                portion.num_rows * sizeof(uint16_t));
    std::memcpy(host + scratch.ids, args.local_expert_ids.data() + portion.first_pair,
                portion.num_pairs * sizeof(uint16_t));
  }
  std::memcpy(host + scratch.source, source, source_bytes);
  std::memcpy(host + scratch.out_of_range, &none, sizeof none);
  DFLASH_TRY(runtime.copy_in(device, host, scratch.out_of_range + sizeof none));
  DFLASH_TRY(runtime.mark(Mark::kBegin));
  if (portion.num_pairs == 0) return ok();
  return queue_rows(args, portion, scratch, device, runtime);
}

// Queues the conversion of the request's rows to what the class computes with.
Status GpuLayer::queue_rows(const ForwardArgs& args, const Portion& portion, const Scratch& scratch,
                            std::byte* device, DeviceRuntime& runtime) const {
  if (code_row_bytes(numerics_.inputs, 1) != 0) {
    return launch_codes(runtime, numerics_.inputs,
                        {device + scratch.source, at<unsigned char>(device, scratch.row_codes),
                         portion.num_rows, spec_.in_size, spec_.in_size, args.row_dtype});
  }
  if (numerics_.inputs == InputRounding::kBf16) {
    const NarrowParams narrow{device + scratch.source, at<uint16_t>(device, scratch.rows),
                              portion.num_rows,        spec_.in_size,
                              scratch.row_stride,      args.row_dtype};
    const uint32_t blocks =
        divide_up(uint64_t{portion.num_rows} * scratch.row_stride, kElementThreads);
    return launch(runtime, kernel_id(PlainKernel::k_narrow_rows), blocks, 1, kElementThreads,
                  narrow);
  }
  const WidenParams widen{device + scratch.source, at<float>(device, scratch.rows),
                          portion.num_rows,        spec_.in_size,
                          scratch.row_stride,      args.row_dtype};
  const uint32_t blocks = divide_up(uint64_t{portion.num_rows} * spec_.in_size, kElementThreads);
  return launch(runtime, kernel_id(PlainKernel::k_widen_rows), blocks, 1, kElementThreads, widen);
}

Status GpuLayer::queue_routing(const Portion& portion, const Scratch& scratch, std::byte* device,
                               DeviceRuntime& runtime) const {
  RoutingParams params{};
  params.row_counts = at<uint16_t>(device, scratch.counts);
  params.expert_ids = at<uint16_t>(device, scratch.ids);
  params.num_rows = portion.num_rows;
  params.num_pairs = portion.num_pairs;
  params.num_experts = num_local_experts_;
  params.few_tile_rows = scratch.few_tile_rows;
  params.row_begins = at<uint32_t>(device, scratch.row_begins);
  params.pair_rows = at<uint32_t>(device, scratch.pair_rows);
  params.expert_counts = at<uint32_t>(device, scratch.expert_counts);
  params.slot_pairs = at<uint32_t>(device, scratch.slot_pairs);
  params.pair_slots = at<uint32_t>(device, scratch.pair_slots);
  params.row_slots = at<uint32_t>(device, scratch.row_slots);
  params.num_tiles = at<uint32_t>(device, scratch.num_tiles);
  params.few_tiles = at<Tile>(device, scratch.few_tiles);
  params.many_tiles = at<Tile>(device, scratch.many_tiles);
  DFLASH_TRY(launch(runtime, kernel_id(PlainKernel::k_begin_routing), 1, 1, kRouteThreads, params));
  DFLASH_TRY(launch(runtime, kernel_id(PlainKernel::k_count_pairs), num_local_experts_, 1,
                    kRouteThreads, params));
  DFLASH_TRY(launch(runtime, kernel_id(PlainKernel::k_list_pairs), num_local_experts_, 1,
                    kRouteThreads, params));
  return launch(runtime, kernel_id(PlainKernel::k_order_rows),
                divide_up(portion.num_pairs, kRouteThreads), 1, kRouteThreads, params);
}

Status GpuLayer::queue_projections(const Portion& portion, const Scratch& scratch,
                                   std::byte* device, DeviceRuntime& runtime) const {
  const bool has_gate = spec_.gate != GateKind::kNone;
  ProjectionParams first{};
  first.spec = spec_;
  first.is_gate_up = true;
  first.slot_pairs = at<uint32_t>(device, scratch.slot_pairs);
  first.pair_rows = at<uint32_t>(device, scratch.pair_rows);
  first.inputs = at<float>(device, scratch.rows);
  first.codes = at<unsigned char>(device, scratch.row_codes);
  first.halves = at<uint16_t>(device, scratch.rows);
  first.outputs = at<float>(device, scratch.hidden);
  first.half_outputs = at<uint16_t>(device, scratch.hidden);
  first.num_inputs = spec_.in_size;
  first.num_outputs = spec_.intermediate_size;
  first.input_stride = scratch.row_stride;
  first.output_stride = scratch.hidden_stride;
  first.experts = reinterpret_cast<const unsigned char*>(experts_);
  first.expert_bytes = places_.num_bytes;
  first.first_panels = has_gate ? places_.gate : places_.up;
  first.second_panels = places_.up;
  first.first_bias = has_gate ? places_.gate_bias : places_.up_bias;
  first.second_bias = places_.up_bias;
  DFLASH_TRY(queue_projection(first, formats_.gate_up, scratch, device, runtime));
  ProjectionParams second = first;
  second.is_gate_up = false;
  second.pair_rows = nullptr;
  second.inputs = at<float>(device, scratch.hidden);
  second.codes = at<unsigned char>(device, scratch.hidden_codes);
  second.halves = at<uint16_t>(device, scratch.hidden);
  second.outputs = at<float>(device, scratch.downs);
  second.num_inputs = spec_.intermediate_size;
  second.num_outputs = spec_.out_size;
  second.input_stride = scratch.hidden_stride;
  second.output_stride = spec_.out_size;
  second.first_panels = places_.down;
  second.first_bias = places_.down_bias;
  if (code_row_bytes(numerics_.inputs, 1) != 0) {
    DFLASH_TRY(launch_codes(
        runtime, numerics_.inputs,
        {device + scratch.hidden, at<unsigned char>(device, scratch.hidden_codes),
         portion.num_pairs, spec_.intermediate_size, scratch.hidden_stride, Dtype::kF32}));
  }
  return queue_projection(second, formats_.down, scratch, device, runtime);
}

// Queues the few-row and the many-row kernel of a projection. Each is launched for the most tiles
// that there can be, and computes those that the device listed for it.
Status GpuLayer::queue_projection(const ProjectionParams& params, WeightFormat format,
                                  const Scratch& scratch, std::byte* device,
                                  DeviceRuntime& runtime) const {
  const uint32_t panels = num_panels(params.num_outputs);
  const bool is_gated = params.is_gate_up && spec_.gate != GateKind::kNone;
  ProjectionParams few = params, many = params;
  few.tiles = at<Tile>(device, scratch.few_tiles);
  few.num_tiles = at<uint32_t>(device, scratch.num_tiles);
  many.tiles = at<Tile>(device, scratch.many_tiles);
  many.num_tiles = few.num_tiles + 1;
  const uint32_t blocks = is_gated ? panels : divide_up(panels, 2);
  const ProjectionKernels kernels =
      projection_kernels(numerics_.inputs, format, params, blocks, device_->facts());
  DFLASH_TRY(launch(runtime, kernels.few, kernels.few_blocks, scratch.most_few_tiles,
                    kernels.few_threads, few));
  if (scratch.most_many_tiles == 0) return ok();
  return launch(runtime, kernels.many, kernels.many_blocks, scratch.most_many_tiles,
                kernels.many_threads, many);
}

CombineParams GpuLayer::combine_params(const Portion& portion, const Scratch& scratch,
                                       std::byte* device, Dtype dtype) const {
  return {at<float>(device, scratch.downs),
          at<uint32_t>(device, scratch.row_begins),
          at<uint32_t>(device, scratch.row_slots),
          at<uint32_t>(device, scratch.slot_pairs),
          at<float>(device, scratch.weights),
          device + scratch.reply,
          at<uint64_t>(device, scratch.out_of_range),
          portion.num_rows,
          spec_.out_size,
          dtype};
}

// The error for an element that the reply's dtype cannot hold. Its value was lost in rounding, so
// the sums are computed once more, in float32.
Status GpuLayer::range_failure(const ForwardArgs& args, const Portion& portion,
                               const Scratch& scratch, std::byte* device, uint64_t index,
                               GpuDevice::Turn& turn, YieldingProgress& progress) const {
  const uint32_t blocks = divide_up(uint64_t{portion.num_rows} * spec_.out_size, kElementThreads);
  const CombineParams params = combine_params(portion, scratch, device, Dtype::kF32);
  auto host = turn.staging(sizeof(float));
  if (!host.ok()) return std::move(host).error();
  DFLASH_TRY(launch(turn.runtime(), kernel_id(PlainKernel::k_combine), blocks, 1, kElementThreads,
                    params));
  DFLASH_TRY(turn.runtime().copy_out(host.value(), device + scratch.reply + index * sizeof(float),
                                     sizeof(float)));
  DFLASH_TRY(turn.drain(progress));
  float value;
  std::memcpy(&value, host.value(), sizeof(value));
  return range_error(portion.first_row + static_cast<uint32_t>(index / spec_.out_size),
                     static_cast<uint32_t>(index % spec_.out_size), value, args.reply_dtype);
}

}  // namespace dflash::compute::gpu
