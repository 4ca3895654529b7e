// A matrix and a row as a numerics class reads them, and one output of their product: what every
// reference is made of, that of experts and that of linear layers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"
#include "compute/numerics.h"
#include "compute/reference/f16_dot2.h"
#include "compute/reference/int8_groups.h"

namespace dflash::compute {

// A matrix as a class reads it; one of the three is filled.
struct ClassMatrix {
  std::vector<float> values;  // [outputs, inputs]
  IntegerWeights integers;    // filled where inputs become int8 codes
  HalfWeights halves;         // filled where inputs become f16 codes
  size_t inputs = 0;

  uint64_t num_bytes() const {
    return 4 * (values.size() + integers.codes.size() + integers.scales.size() +
                integers.offsets.size() + halves.codes.size() + halves.scales.size() +
                halves.offsets.size());
  }
};

// Makes what a layer that keeps `resident` holds of a matrix; `name` is what errors call it.
// Errors: those of check_resident and check_values.
Result<ClassMatrix> class_matrix(const char* name, const MatrixView& view, WeightFormat resident,
                                 const NumericsFacts& facts);

// A row as a class reads it; one of the three is filled.
struct ClassRow {
  std::vector<float> values;
  Int8Codes integers;  // filled where inputs become int8 codes
  HalfCodes halves;    // filled where inputs become f16 codes
};
ClassRow class_row(const NumericsFacts& facts, std::vector<float> values);

// One output without its bias.
float class_dot(const NumericsFacts& facts, const ClassMatrix& matrix, size_t output,
                const ClassRow& row);

}  // namespace dflash::compute
