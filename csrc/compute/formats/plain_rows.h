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

// Returns how many outputs to read from the file at a time: a multiple of `unit` that begins at a
// row of scales. 0 means to read through the mapping, for plain memory and for rows that lie far
// apart, because another matrix is between them or outputs are side by side. It is never 0 for a
// matrix that has to be made plain.
uint32_t outputs_read_at_once(const MatrixView& matrix, uint32_t unit);

// Makes `part`, which comes as a copy of the whole matrix's view, the view of `count` outputs from
// `first` on, which are read into `read`. `first` is a multiple of the outputs that share a row of
// scales. Errors: kCheckpoint naming the file.
Status read_outputs(uint32_t first, uint32_t count, MatrixView& part, std::vector<std::byte>& read);

}  // namespace dflash::compute
