// Rows of a matrix out of the file that it lies in, instead of through the mapping.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// How many outputs one read of the file takes, in multiples of `unit`; 0: the mapping is read
// instead, because the rows lie in memory, or far apart (another matrix is between them, or outputs
// are side by side). A read stays in the second-level cache until it is used, and is long enough
// for a system call; its scales begin where it begins.
uint32_t outputs_read_at_once(const MatrixView& matrix, uint32_t unit);

// Makes `part`, a copy of the whole matrix's view, that of `count` outputs from `first` on, read
// into `read`. `first` is a multiple of the outputs that share a row of scales. Errors: kCheckpoint
// naming the file.
Status read_outputs(uint32_t first, uint32_t count, MatrixView& part, std::vector<std::byte>& read);

}  // namespace dflash::compute
