// Brings one matrix of a checkpoint into the panels that a set of kernels reads. The matrix lies in
// a file or in memory; its values are checked, its checksum is taken and its outputs are packed
// panel by panel, so that each byte comes from memory only once. What the matrix belongs to, an
// expert or a linear layer, is the caller's affair.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/cpu/kernel_set.h"
#include "compute/experts/content_checksum.h"
#include "compute/formats/matrix_view.h"
#include "compute/yielding_progress.h"

namespace dflash::compute {

// Where the panels of a matrix go, and in which resident format. The step may be larger than a
// panel, so that the panels of two matrices (gate and up) can alternate.
struct PanelTarget {
  WeightFormat format;
  std::byte* first;
  size_t step_bytes;  // distance from the start of one panel to the start of the next
};

// Any thread; one packer may pack several matrices at a time, each with its own `read` buffer.
class MatrixPacker {
 public:
  MatrixPacker() = default;
  explicit MatrixPacker(const KernelSet& kernels);

  // Packs all panels of `matrix` and adds its source bytes to `sum`. `name` is what error messages
  // call the matrix. `read` is the buffer for rows that come from a file; the caller keeps it for
  // many matrices, so that it is allocated once. The caller holds a CanonicalFloatMode, because
  // quantising rounds. Errors: kCheckpoint naming the file, or the output and input of a bad value.
  Status pack(const char* name, const MatrixView& matrix, const PanelTarget& target,
              std::vector<std::byte>& read, MatrixChecksum& sum, YieldingProgress& progress) const;
  // Makes the checks of pack() on every value, without packing.
  Status check(const char* name, const MatrixView& matrix, WeightFormat format,
               YieldingProgress& progress) const;
  // Packs `num_panels` panels of a matrix that check() has passed. Errors: kCheckpoint where the
  // file cannot be read.
  Status pack_panels(const MatrixView& matrix, uint32_t first_panel, uint32_t num_panels,
                     const PanelTarget& target, std::vector<std::byte>& read) const;

 private:
  decltype(KernelSet::pack) pack_ = nullptr;
  uint32_t panel_width_ = 0;
};

}  // namespace dflash::compute
