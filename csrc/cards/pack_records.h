// Packs weights of a mapped checkpoint into panels for device memory (record_layout.h), on the
// host.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/record_layout.h"
#include "compute/formats/matrix_view.h"

namespace dflash::compute::gpu {

// Packs outputs [panel * 32, panel * 32 + 32) of `matrix` in the resident format into `packed`,
// which has panel_bytes(resident, matrix.inputs). The view has passed check_resident() and
// check_values(). The caller is in CanonicalFloatMode, because quantising rounds.
void pack_panel(const MatrixView& matrix, WeightFormat resident, uint32_t panel, std::byte* packed);

}  // namespace dflash::compute::gpu
