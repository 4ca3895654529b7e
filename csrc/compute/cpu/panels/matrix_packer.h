// A matrix of a checkpoint into the panels that one set of kernels reads: out of its file or its
// mapping, checked, summed up and packed panel by panel, so that its bytes come from memory once.
// What the matrix belongs to - experts, a linear layer - is the caller's affair.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "compute/cpu/kernel_set.h"
#include "compute/formats/matrix_checksum.h"
#include "compute/formats/matrix_view.h"
#include "compute/yielding_progress.h"

namespace dflash::compute {

// Where the panels of a matrix go, and in which format. Panels of two matrices may alternate.
struct PanelTarget {
  WeightFormat format;
  std::byte* first;
  size_t step_bytes;  // from one panel to the next
};

class MatrixPacker {
 public:
  MatrixPacker() = default;
  explicit MatrixPacker(const KernelSet& kernels);

  // Packs all panels and adds the matrix's source bytes to `sum`. `name` is what errors call it;
  // `read` holds what was read of the file last, one buffer for many matrices. Under
  // CanonicalFloatMode: quantising rounds. Errors: kCheckpoint naming file, or output and input.
  Status pack(const char* name, const MatrixView& matrix, const PanelTarget& target,
              std::vector<std::byte>& read, MatrixChecksum& sum, YieldingProgress& progress) const;
  // What pack() checks, without packing.
  Status check(const char* name, const MatrixView& matrix, WeightFormat format,
               YieldingProgress& progress) const;
  // Packs some panels of a matrix that check() has passed.
  Status pack_panels(const MatrixView& matrix, uint32_t first_panel, uint32_t num_panels,
                     const PanelTarget& target, std::vector<std::byte>& read) const;

 private:
  decltype(KernelSet::pack) pack_ = nullptr;
  uint32_t panel_width_ = 0;
};

}  // namespace dflash::compute
