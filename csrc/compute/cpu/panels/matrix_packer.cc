// Walks over a matrix in pieces that a read of the file brings, and over a piece in panels.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/panels/matrix_packer.h"

#include <algorithm>

#include "compute/cpu/panels/pack.h"
#include "compute/formats/plain_rows.h"
#include "compute/formats/value_checks.h"

namespace dflash::compute {

MatrixPacker::MatrixPacker(const KernelSet& kernels)
    : pack_(kernels.pack == nullptr ? pack_panel : kernels.pack),
      panel_width_(kernels.panel_width) {}

Status MatrixPacker::pack(const char* name, const MatrixView& matrix, const PanelTarget& target,
                          std::vector<std::byte>& read, MatrixChecksum& sum,
                          YieldingProgress& progress) const {
  const uint32_t at_once = outputs_read_at_once(matrix, panel_width_);
  for (uint32_t first = 0; first < matrix.outputs;
       first += at_once == 0 ? matrix.outputs : at_once) {
    MatrixView part = matrix;
    if (at_once != 0)
      DFLASH_TRY(read_outputs(first, std::min(at_once, matrix.outputs - first), part, read));
    std::byte* packed = target.first + first / panel_width_ * target.step_bytes;
    for (uint32_t begin = 0; begin < part.outputs;
         begin += panel_width_, packed += target.step_bytes) {
      // The check and the sum read the rows that packing reads next: they come from memory once.
      const uint32_t count = std::min(panel_width_, part.outputs - begin);
      Status checked = check_values(name, part, target.format, begin, count);
      if (!checked.ok()) {
        // Repeated on the whole matrix, whose output numbers are those of the checkpoint.
        DFLASH_TRY(check_values(name, matrix, target.format, first + begin, count));
        return checked;
      }
      sum.add(part, first, first + begin, count);
      pack_(part, target.format, begin / panel_width_, panel_width_, packed);
      // In a worker, the serving thread may move bytes of its data path here.
      progress.count_and_yield();
    }
  }
  return ok();
}

Status MatrixPacker::check(const char* name, const MatrixView& matrix, WeightFormat format,
                           YieldingProgress& progress) const {
  for (uint32_t first = 0; first < matrix.outputs; first += panel_width_) {
    DFLASH_TRY(
        check_values(name, matrix, format, first, std::min(panel_width_, matrix.outputs - first)));
    // In a worker, the serving thread may move bytes of its data path here.
    progress.count_and_yield();
  }
  return ok();
}

Status MatrixPacker::pack_panels(const MatrixView& matrix, uint32_t first_panel,
                                 uint32_t num_panels, const PanelTarget& target,
                                 std::vector<std::byte>& read) const {
  MatrixView part = matrix;
  uint32_t panel = first_panel;
  if (outputs_read_at_once(matrix, panel_width_) != 0) {
    const uint32_t scale_outputs = outputs_per_scale(matrix);
    // A part that is read alone must begin on a boundary of scales, since its scales begin with it.
    const uint32_t first = first_panel * panel_width_ / scale_outputs * scale_outputs;
    const uint32_t end = std::min((first_panel + num_panels) * panel_width_, matrix.outputs);
    DFLASH_TRY(read_outputs(first, end - first, part, read));
    panel = (first_panel * panel_width_ - first) / panel_width_;
  }
  for (uint32_t p = 0; p < num_panels; ++p)
    pack_(part, target.format, panel + p, panel_width_, target.first + p * target.step_bytes);
  return ok();
}

}  // namespace dflash::compute
