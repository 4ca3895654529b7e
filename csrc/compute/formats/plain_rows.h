// Makes plain what checkpoints keep otherwise than the formats say: FP8 with scales of other shapes
// or dtypes, and four-bit integers that are packed in words along inputs or outputs. Whatever reads
// weights afterwards (checks, checksums, packing) knows plain rows alone. A few rows are made at a
// time, so that a matrix never lies in memory twice.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/formats/matrix_view.h"

namespace dflash::compute {

// Whether the rows of a matrix are as its format says.
inline bool is_plain(const MatrixView& matrix) { return matrix.layout.packing == Packing::kNone; }

// How many outputs share a row of scales; 1 where scales do not lie apart, and of rows that will be
// made plain.
uint32_t outputs_per_scale(const MatrixView& matrix);

// Returns a plain view of outputs [first, first + count). What had to be made lies in `made`, which
// must outlive the view: blocks of int4_zp, or the float32 scales of FP8, a row per output. The
// codes of FP8 stay where they are. Reads through the mapping.
MatrixView plain_rows(const MatrixView& matrix, uint32_t first, uint32_t count,
                      std::vector<std::byte>& made);

// Returns a matrix that is plain as it is, and otherwise plain rows of all outputs.
MatrixView plain_matrix(const MatrixView& matrix, std::vector<std::byte>& made);

// Reads rows of a matrix from the file in which it lies, instead of through the mapping.

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
