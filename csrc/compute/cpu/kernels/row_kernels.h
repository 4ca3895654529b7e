// The kernels of the row operators, written once over a vector type V. Included by
// operators_<set>.cc only; V is a type of its own per set, so that no two files instantiate the
// same symbol.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/row_kernel_set.h"
#include "compute/operators/argmax.h"
#include "compute/operators/gating.h"
#include "compute/operators/norm.h"
#include "compute/operators/rotary.h"
#include "compute/operators/router.h"

namespace dflash::compute {

template <class V>
constexpr RowKernels make_row_kernels() {
  return RowKernels{.rms_norm = rms_norm_row<V>,
                    .layer_norm = layer_norm_row<V>,
                    .rotate = rotate_pairs<V>,
                    .route = route_row<V>,
                    .gate = gate_row<V>,
                    .add_scaled = add_scaled_row<V>,
                    .argmax = argmax_row<V>};
}

}  // namespace dflash::compute
