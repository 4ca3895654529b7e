// Reads rows of a matrix from the file in which it lies, instead of through the mapping.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Returns how many outputs one read of the file takes, in multiples of `unit`, or 0 if they are to
// be read through the mapping. That is so where the rows lie in plain memory, and where they lie
// far apart because another matrix is between them or outputs are side by side. A read begins where
// its scales begin. Rows that are made plain are always taken so.
uint32_t outputs_read_at_once(const MatrixView& matrix, uint32_t unit);

// Makes `part`, which comes as a copy of the whole matrix's view, the view of `count` outputs from
// `first` on, which are read into `read`. `first` is a multiple of the outputs that share a row of
// scales. Errors: kCheckpoint naming the file.
Status read_outputs(uint32_t first, uint32_t count, MatrixView& part, std::vector<std::byte>& read);

}  // namespace dflash::compute
