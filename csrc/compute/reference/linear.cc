// A linear layer one output at a time.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/row_operators.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "compute/experts/layer_checks.h"
#include "compute/formats/dequantize.h"
#include "compute/reference/class_products.h"

namespace dflash::compute {
namespace {

// Writes the outputs of one part for one row into `sums`; no residual is added yet.
void multiply_part(const LinearPart& part, const ClassMatrix& matrix, const NumericsFacts& facts,
                   const RowsView& rows, uint32_t r, float* sums) {
  std::vector<float> inputs(part.matrix.inputs);
  widen(rows.dtype, rows.data + r * rows.stride_bytes + part.input_column * dtype_bytes(rows.dtype),
        inputs.data(), inputs.size());
  const ClassRow row = class_row(facts, std::move(inputs));
  const std::vector<float> bias = widen_vector(part.bias, part.matrix.outputs);
  for (uint32_t o = 0; o < part.matrix.outputs; ++o) {
    sums[o] = class_dot(facts, matrix, o, row);
    if (!bias.empty()) sums[o] = sums[o] + bias[o];
  }
}

Status finish_row(uint32_t r, std::vector<float>& sums, const RowsTarget& out,
                  const RowsView* residual) {
  if (residual != nullptr)
    widen_add(residual->dtype, residual->data + r * residual->stride_bytes, sums.data(),
              sums.size());
  for (float& value : sums) {
    // One NaN, whatever payload an fma has kept.
    if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
  }
  if (convert(Dtype::kF32, reinterpret_cast<const std::byte*>(sums.data()), out.dtype,
              out.data + r * out.stride_bytes, sums.size()))
    return ok();
  uint32_t column = 0;
  while (!overflows(sums[column], out.dtype)) ++column;
  return range_error(r, column, sums[column], out.dtype);
}

}  // namespace

Status reference_linear(std::span<const LinearPart> parts, NumericsClass numerics,
                        const RowsView& rows, const RowsTarget& out, const RowsView* residual) {
  DFLASH_TRY(check_parts(parts));
  DFLASH_TRY(check_linear_rows(rows, out, residual));
  const CanonicalFloatMode mode;
  std::vector<ClassMatrix> matrices;
  size_t outputs = 0;
  for (const LinearPart& part : parts) {
    const NumericsFacts& facts = numerics_facts(part_numerics(numerics, part.format()));
    auto matrix = class_matrix("a part", part.matrix, part.format(), facts);
    if (!matrix.ok()) return std::move(matrix).error();
    matrices.push_back(std::move(matrix).value());
    outputs += part.matrix.outputs;
  }
  for (uint32_t r = 0; r < rows.num_rows; ++r) {
    std::vector<float> sums(outputs);
    float* at = sums.data();
    for (size_t p = 0; p < parts.size(); at += parts[p++].matrix.outputs) {
      const NumericsFacts& facts = numerics_facts(part_numerics(numerics, parts[p].format()));
      multiply_part(parts[p], matrices[p], facts, rows, r, at);
    }
    DFLASH_TRY(finish_row(r, sums, out, residual));
  }
  return ok();
}

}  // namespace dflash::compute
