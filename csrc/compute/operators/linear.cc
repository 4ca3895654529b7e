// The checks of a linear layer's parts and of the rows with which it is called.
// SPDX-License-Identifier: Apache-2.0
#include "compute/operators/linear.h"

#include <string>
#include <utility>

#include "compute/formats/value_checks.h"

namespace dflash::compute {
namespace {

Error invalid(std::string message) {
  return Error{ErrorCode::kInvalidArgument, std::move(message)};
}

Status check_part(const std::string& name, const LinearPart& part, uint32_t inputs) {
  const MatrixView& matrix = part.matrix;
  if (matrix.data == nullptr || matrix.outputs == 0 || matrix.inputs == 0)
    return invalid(name + " of a linear layer has no matrix");
  DFLASH_TRY(check_stored(name.c_str(), matrix));
  if (matrix.inputs != inputs) {
    return invalid(name + " of a linear layer has " + std::to_string(matrix.inputs) +
                   " inputs, part 0 has " + std::to_string(inputs));
  }
  if (uint64_t{part.input_column} + matrix.inputs > UINT32_MAX)
    return invalid(name + " begins at input column " + std::to_string(part.input_column) +
                   ", which is beyond any row");
  const VectorView& bias = part.bias;
  if (bias.data != nullptr &&
      (static_cast<uint8_t>(bias.dtype) >= kNumDtypes || bias.count != matrix.outputs)) {
    return invalid(name + " has " + std::to_string(matrix.outputs) + " outputs and a bias of " +
                   std::to_string(bias.count) + " elements");
  }
  return check_resident(name.c_str(), matrix, part.format());
}

}  // namespace

Status check_parts(std::span<const LinearPart> parts) {
  if (parts.empty()) return invalid("a linear layer has at least one part");
  uint64_t outputs = 0;
  for (size_t p = 0; p < parts.size(); ++p) {
    DFLASH_TRY(check_part("part " + std::to_string(p), parts[p], parts[0].matrix.inputs));
    outputs += parts[p].matrix.outputs;
  }
  if (outputs > UINT32_MAX)
    return invalid("a linear layer has " + std::to_string(outputs) + " outputs; at most 2^32 - 1");
  return ok();
}

NumericsClass part_numerics(NumericsClass wanted, WeightFormat format) {
  return numerics_facts(wanted).takes(format) ? wanted : kDefaultNumerics;
}

Status check_linear_rows(const RowsView& rows, const RowsTarget& out, const RowsView* residual) {
  if (rows.num_rows == 0) return ok();
  if (rows.data == nullptr || out.data == nullptr ||
      (residual != nullptr && residual->data == nullptr))
    return invalid("a linear layer is called without memory for its rows");
  if (static_cast<uint8_t>(rows.dtype) >= kNumDtypes ||
      static_cast<uint8_t>(out.dtype) >= kNumDtypes ||
      (residual != nullptr && static_cast<uint8_t>(residual->dtype) >= kNumDtypes))
    return invalid("a linear layer is called with an unknown dtype");
  if (residual != nullptr && residual->num_rows != rows.num_rows) {
    return invalid(std::to_string(rows.num_rows) + " rows have a residual of " +
                   std::to_string(residual->num_rows) + " rows");
  }
  return ok();
}

}  // namespace dflash::compute
