// SPDX-License-Identifier: Apache-2.0
#include "plugin/abi_records.h"

namespace dflash::plugin {
namespace {

using compute::Activation;
using compute::GateKind;
using compute::MatrixView;
using compute::NumericsClass;
using compute::VectorView;
using compute::WeightFormat;

// The table's numbers are those of the core's enumerations; a value that moved must not compile.
static_assert(static_cast<int>(ErrorCode::kInvalidArgument) == 1 &&
              static_cast<int>(ErrorCode::kClosed) == 11);
static_assert(static_cast<int>(Dtype::kF32) == 0 && static_cast<int>(Dtype::kF16) == 1 &&
              static_cast<int>(Dtype::kBF16) == 2);
static_assert(static_cast<int>(WeightFormat::kInt8G32) == 3 &&
              static_cast<int>(WeightFormat::kQ8_0) == 7 &&
              static_cast<int>(WeightFormat::kIq4Xs) == 14);

// `value` as an enumerator below `count`.
template <class Enumeration>
Result<Enumeration> enumerator(const char* field, uint32_t value, uint32_t count) {
  if (value < count) return static_cast<Enumeration>(value);
  return Error{ErrorCode::kUnsupported,
               std::string("backend table: ") + field + " " + std::to_string(value) +
                   " is not known to this build, which knows 0.." + std::to_string(count - 1)};
}

dflash_matrix to_record(const MatrixView& view) {
  return {view.data,         view.scales,        view.output_stride,
          view.input_stride, view.scales_stride, static_cast<uint32_t>(view.format),
          view.outputs,      view.inputs,        view.layout.scale_outputs};
}
dflash_vector to_record(const VectorView& view) {
  return {view.data, view.stride, static_cast<uint32_t>(view.dtype), view.count};
}

Status fill(MatrixView& view, const dflash_matrix& record) {
  if (record.data == nullptr) return ok();
  auto format = enumerator<WeightFormat>("format", record.format, compute::kNumWeightFormats);
  if (!format.ok()) return std::move(format).error();
  view = {static_cast<const std::byte*>(record.data),
          format.value(),
          record.outputs,
          record.inputs,
          record.output_stride,
          record.input_stride,
          static_cast<const std::byte*>(record.scales),
          record.scales_stride};
  view.layout.scale_outputs = record.scale_outputs;
  return ok();
}

Status fill(VectorView& view, const dflash_vector& record) {
  if (record.data == nullptr) return ok();
  auto dtype = enumerator<Dtype>("dtype", record.dtype, kNumDtypes);
  if (!dtype.ok()) return std::move(dtype).error();
  view = {static_cast<const std::byte*>(record.data), dtype.value(), record.count, record.stride};
  return ok();
}

}  // namespace

int32_t report(const Error& failure, dflash_error* error) {
  auto record = new_record<dflash_error>();
  record.code = static_cast<int32_t>(failure.code);
  set_text(record.text, failure.message);
  write_record(error, record);
  return record.code;
}

Error error_of(int32_t status, const dflash_error& error) {
  const bool is_known = status >= static_cast<int32_t>(ErrorCode::kInvalidArgument) &&
                        status <= static_cast<int32_t>(ErrorCode::kClosed);
  const std::string text = text_of(error.text);
  return Error{is_known ? static_cast<ErrorCode>(status) : ErrorCode::kWorkerFailed,
               text.empty()
                   ? "the backend failed with status " + std::to_string(status) + " and no text"
                   : text};
}

dflash_ffn_spec to_record(const compute::FfnSpec& spec) {
  auto record = new_record<dflash_ffn_spec>();
  record.in_size = spec.in_size;
  record.intermediate_size = spec.intermediate_size;
  record.out_size = spec.out_size;
  record.activation = static_cast<uint32_t>(spec.activation);
  record.gate = static_cast<uint32_t>(spec.gate);
  record.has_gate_up_bias = spec.has_gate_up_bias;
  record.has_down_bias = spec.has_down_bias;
  record.alpha = spec.alpha;
  record.up_offset = spec.up_offset;
  record.gate_max = spec.gate_max;
  record.up_limit = spec.up_limit;
  return record;
}

Result<compute::FfnSpec> spec_of(const dflash_ffn_spec& record) {
  auto activation = enumerator<Activation>("activation", record.activation,
                                           static_cast<uint32_t>(Activation::kQuickGelu) + 1);
  if (!activation.ok()) return std::move(activation).error();
  auto gate = enumerator<GateKind>("gate", record.gate,
                                   static_cast<uint32_t>(GateKind::kClampedSwiglu) + 1);
  if (!gate.ok()) return std::move(gate).error();
  compute::FfnSpec spec;
  spec.in_size = record.in_size;
  spec.intermediate_size = record.intermediate_size;
  spec.out_size = record.out_size;
  spec.activation = activation.value();
  spec.gate = gate.value();
  spec.has_gate_up_bias = record.has_gate_up_bias != 0;
  spec.has_down_bias = record.has_down_bias != 0;
  spec.alpha = record.alpha;
  spec.up_offset = record.up_offset;
  spec.gate_max = record.gate_max;
  spec.up_limit = record.up_limit;
  DFLASH_TRY(spec.validate());
  return spec;
}

dflash_layer_options to_record(const LayerOptions& options) {
  auto record = new_record<dflash_layer_options>();
  record.num_local_experts = options.num_local_experts;
  record.gate_up_format = static_cast<uint32_t>(options.formats.gate_up);
  record.down_format = static_cast<uint32_t>(options.formats.down);
  record.numerics = static_cast<uint32_t>(options.numerics);
  return record;
}

Result<LayerOptions> layer_options_of(const dflash_layer_options& record) {
  auto gate_up =
      enumerator<WeightFormat>("gate_up_format", record.gate_up_format, compute::kNumWeightFormats);
  if (!gate_up.ok()) return std::move(gate_up).error();
  auto down =
      enumerator<WeightFormat>("down_format", record.down_format, compute::kNumWeightFormats);
  if (!down.ok()) return std::move(down).error();
  auto numerics = enumerator<NumericsClass>(
      "numerics", record.numerics, static_cast<uint32_t>(compute::numerics_table().size()));
  if (!numerics.ok()) return std::move(numerics).error();
  return LayerOptions{
      record.num_local_experts, {gate_up.value(), down.value()},
       numerics.value()
  };
}

dflash_expert to_record(uint32_t local_expert_id, const compute::ExpertWeights& weights) {
  auto record = new_record<dflash_expert>();
  record.local_expert_id = local_expert_id;
  record.gate = to_record(weights.gate);
  record.up = to_record(weights.up);
  record.down = to_record(weights.down);
  record.gate_bias = to_record(weights.gate_bias);
  record.up_bias = to_record(weights.up_bias);
  record.down_bias = to_record(weights.down_bias);
  return record;
}

Result<compute::ExpertWeights> weights_of(const dflash_expert& record) {
  compute::ExpertWeights weights;
  DFLASH_TRY(fill(weights.gate, record.gate));
  DFLASH_TRY(fill(weights.up, record.up));
  DFLASH_TRY(fill(weights.down, record.down));
  DFLASH_TRY(fill(weights.gate_bias, record.gate_bias));
  DFLASH_TRY(fill(weights.up_bias, record.up_bias));
  DFLASH_TRY(fill(weights.down_bias, record.down_bias));
  return weights;
}

dflash_batch to_record(const compute::ForwardArgs& args) {
  auto record = new_record<dflash_batch>();
  record.num_rows = args.num_rows;
  record.num_pairs = static_cast<uint32_t>(args.weights.size());
  record.row_dtype = static_cast<uint32_t>(args.row_dtype);
  record.reply_dtype = static_cast<uint32_t>(args.reply_dtype);
  record.rows = args.rows;
  record.row_counts = args.row_counts.data();
  record.local_expert_ids = args.local_expert_ids.data();
  record.weights = args.weights.data();
  record.reply = args.reply;
  return record;
}

Result<compute::ForwardArgs> batch_of(const dflash_batch& record) {
  auto row_dtype = enumerator<Dtype>("row_dtype", record.row_dtype, kNumDtypes);
  if (!row_dtype.ok()) return std::move(row_dtype).error();
  auto reply_dtype = enumerator<Dtype>("reply_dtype", record.reply_dtype, kNumDtypes);
  if (!reply_dtype.ok()) return std::move(reply_dtype).error();
  compute::ForwardArgs args;
  args.rows = static_cast<const std::byte*>(record.rows);
  args.row_dtype = row_dtype.value();
  args.num_rows = record.num_rows;
  args.row_counts = {record.row_counts, record.num_rows};
  args.local_expert_ids = {record.local_expert_ids, record.num_pairs};
  args.weights = {record.weights, record.num_pairs};
  args.reply = static_cast<std::byte*>(record.reply);
  args.reply_dtype = reply_dtype.value();
  return args;
}

}  // namespace dflash::plugin
