// What a linear layer of a host computes: an expert with one matrix, of which several can share
// their rows. The reference (reference/row_operators.h) and the processor (cpu/packed_linear.h) do
// what stands here.
//
//   out[r, o] = round(bias[o] + sum over i of weight[o, i] * row[r, input_column + i]
//                     (+ residual[r, o]))
//
// The sum is that of the part's numerics class (docs/numerics.md), in float32, and so is each
// addition, in the order sum + bias + residual. The result is rounded once, to the dtype of the
// output. A NaN is always 0x7fc00000 before it is rounded. A row's bits do not depend on other
// rows.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <span>

#include "compute/formats/matrix_view.h"
#include "compute/numerics.h"
#include "compute/operators/rows.h"

namespace dflash::compute {

// One matrix of a linear layer; nothing is owned. The outputs of all parts lie side by side, in the
// order of the parts.
struct LinearPart {
  MatrixView matrix;                       // [outputs, inputs]
  VectorView bias;                         // [outputs]; without data where there is none
  uint32_t input_column = 0;               // where in a row the matrix's inputs begin
  std::optional<WeightFormat> resident{};  // the format that is kept; the stored one where empty

  WeightFormat format() const { return resident.value_or(matrix.format); }
};

// Checks parts that are to be one layer, which are at least one and have equal inputs. Errors:
// kInvalidArgument naming the part; kUnsupported where a format cannot hold a matrix.
Status check_parts(std::span<const LinearPart> parts);

// The class that a part of a layer gets: the wanted one if it takes the format, and f32-canonical,
// which takes all, if not.
NumericsClass part_numerics(NumericsClass wanted, WeightFormat format);

// Checks what a layer is called with. `residual` may be null. Errors: kInvalidArgument.
Status check_linear_rows(const RowsView& rows, const RowsTarget& out, const RowsView* residual);

}  // namespace dflash::compute
