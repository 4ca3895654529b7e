// Checks of arguments that all backends share.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/layer_checks.h"

#include <cmath>
#include <cstdio>
#include <string>
#include <tuple>

#include "base/dtype.h"
#include "compute/formats/value_checks.h"

namespace dflash::compute {
namespace {

Error invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message)};
}

Status check_matrix(const char* name, const MatrixView& matrix, bool is_wanted, uint32_t outputs,
                    uint32_t inputs) {
  if (!is_wanted)
    return matrix.data == nullptr
               ? ok()
               : Status(invalid(std::string(name) + " is given, but the spec has none"));
  if (matrix.data == nullptr)
    return invalid(std::string(name) + " is missing; the spec asks for it");
  DFLASH_TRY(check_stored(name, matrix));
  if (matrix.outputs == outputs && matrix.inputs == inputs) return ok();
  return invalid(std::string(name) + " is [" + std::to_string(matrix.outputs) + ", " +
                 std::to_string(matrix.inputs) + "] (outputs, inputs); the spec asks for [" +
                 std::to_string(outputs) + ", " + std::to_string(inputs) + "]");
}

Status check_vector(const char* name, const VectorView& vector, bool is_wanted, uint32_t count) {
  if (!is_wanted)
    return vector.data == nullptr
               ? ok()
               : Status(invalid(std::string(name) + " is given, but the spec has none"));
  if (vector.data == nullptr)
    return invalid(std::string(name) + " is missing; the spec asks for it");
  if (static_cast<uint8_t>(vector.dtype) >= kNumDtypes)
    return invalid(std::string(name) + " has an unknown dtype");
  if (vector.count == count) return ok();
  return invalid(std::string(name) + " has " + std::to_string(vector.count) +
                 " elements; the spec asks for " + std::to_string(count));
}

}  // namespace

Status check_expert(const FfnSpec& spec, uint32_t num_local_experts, uint32_t local_expert_id,
                    const ExpertWeights& weights) {
  if (local_expert_id >= num_local_experts) {
    return invalid("local expert " + std::to_string(local_expert_id) + " of a layer with " +
                   std::to_string(num_local_experts));
  }
  const bool has_gate = spec.gate != GateKind::kNone;
  DFLASH_TRY(check_matrix("gate", weights.gate, has_gate, spec.intermediate_size, spec.in_size));
  DFLASH_TRY(check_matrix("up", weights.up, true, spec.intermediate_size, spec.in_size));
  DFLASH_TRY(check_matrix("down", weights.down, true, spec.out_size, spec.intermediate_size));
  DFLASH_TRY(check_vector("gate_bias", weights.gate_bias, has_gate && spec.has_gate_up_bias,
                          spec.intermediate_size));
  DFLASH_TRY(
      check_vector("up_bias", weights.up_bias, spec.has_gate_up_bias, spec.intermediate_size));
  return check_vector("down_bias", weights.down_bias, spec.has_down_bias, spec.out_size);
}

Status check_batch(const ForwardArgs& args, uint32_t num_local_experts) {
  if (args.row_counts.size() != args.num_rows) {
    return invalid("a batch of " + std::to_string(args.num_rows) + " rows has " +
                   std::to_string(args.row_counts.size()) + " counts");
  }
  if (args.num_rows != 0 && (args.rows == nullptr || args.reply == nullptr))
    return invalid("a batch without rows or reply memory");
  if (static_cast<uint8_t>(args.row_dtype) >= kNumDtypes ||
      static_cast<uint8_t>(args.reply_dtype) >= kNumDtypes) {
    return invalid("a batch with an unknown dtype");
  }
  uint64_t num_pairs = 0;
  for (uint16_t count : args.row_counts) num_pairs += count;
  if (num_pairs != args.local_expert_ids.size() || num_pairs != args.weights.size()) {
    return invalid("row counts add up to " + std::to_string(num_pairs) + " pairs, but there are " +
                   std::to_string(args.local_expert_ids.size()) + " ids and " +
                   std::to_string(args.weights.size()) + " weights");
  }
  for (uint16_t id : args.local_expert_ids) {
    if (id >= num_local_experts) {
      return invalid("local expert " + std::to_string(id) + " of a layer with " +
                     std::to_string(num_local_experts));
    }
  }
  return ok();
}

Error range_error(uint32_t row, uint32_t column, float value, Dtype dtype) {
  char text[192];
  std::snprintf(text, sizeof(text),
                "row %u, column %u: value %.9g exceeds the range of %s; ask for a wider reply "
                "dtype (f32 holds it)",
                row, column, static_cast<double>(value), dtype_name(dtype));
  return Error{ErrorCode::kRange, text};
}

bool overflows(float value, Dtype dtype) {
  if (dtype == Dtype::kF32 || !std::isfinite(value)) return false;
  return std::isinf(dtype == Dtype::kF16 ? f16_to_f32(f32_to_f16(value))
                                         : bf16_to_f32(f32_to_bf16(value)));
}

void FirstOverflow::keep(uint32_t row, uint32_t first_column, std::span<const float> values,
                         Dtype dtype) {
  for (uint32_t i = 0; i < values.size(); ++i) {
    if (!overflows(values[i], dtype)) continue;
    const Place found{row, first_column + i, values[i], dtype};
    const std::lock_guard lock(mutex_);
    if (!first_ || std::tie(found.row, found.column) < std::tie(first_->row, first_->column))
      first_ = found;
    return;
  }
}

Status FirstOverflow::take() {
  const std::lock_guard lock(mutex_);
  if (!first_) return ok();
  return range_error(first_->row, first_->column, first_->value, first_->dtype);
}

}  // namespace dflash::compute
