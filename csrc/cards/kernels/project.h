// What the few-row and the many-row kernels of gate, up and down share: the matrices of a tile's
// expert, the rows it reads and what becomes of a finished sum.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernel_params.h"
#include "cards/kernels/decode.h"
#include "cards/kernels/device_vector.h"

namespace dflash::compute::gpu {

// The row that a slot reads: gate and up read the row of the slot's pair, down reads row `slot`.
GPU_FN uint32_t row_of(const ProjectionParams& params, uint32_t slot) {
  return params.pair_rows == nullptr ? slot : params.pair_rows[params.slot_pairs[slot]];
}
GPU_FN const float* input_of(const ProjectionParams& params, uint32_t slot) {
  return params.inputs + uint64_t{row_of(params, slot)} * params.input_stride;
}

// Adds the bias to a sum. `bias` is its offset inside the expert, or kNoBias.
GPU_FN float with_bias(const ProjectionParams& params, uint32_t expert, uint64_t bias,
                       uint32_t output, float sum) {
  if (bias == kNoBias) return sum;
  return add(sum, reinterpret_cast<const float*>(params.experts + expert * params.expert_bytes +
                                                 bias)[output]);
}

// Whether the block computes a gate beside `up`, so that its two panels are of two matrices.
GPU_FN bool is_gated(const ProjectionParams& params) {
  return params.is_gate_up && params.spec.gate != GateKind::kNone;
}

// What becomes of a finished sum: an intermediate value (`second` is then the sum of `up`, where
// there is a gate), or an output of down.
GPU_FN float output_value(const ProjectionParams& params, uint32_t expert, uint32_t output,
                          float first, float second) {
  const float value = with_bias(params, expert, params.first_bias, output, first);
  if (!params.is_gate_up) return value;
  const float up =
      is_gated(params) ? with_bias(params, expert, params.second_bias, output, second) : value;
  return gate<DeviceVector>(params.spec, value, up);
}

// Writes what becomes of a finished sum; nothing for an output beyond the last.
GPU_FN void finish_output(const ProjectionParams& params, uint32_t expert, uint32_t slot,
                          uint32_t output, float first, float second) {
  if (output >= params.num_outputs) return;
  params.outputs[uint64_t{slot} * params.output_stride + output] =
      output_value(params, expert, output, first, second);
}

// Panel `panel` of the matrix whose panels begin at offset `panels` inside the expert.
template <WeightFormat kFormat>
GPU_FN const unsigned char* panel_of(const ProjectionParams& params, uint32_t expert,
                                     uint64_t panels, uint32_t panel) {
  return params.experts + expert * params.expert_bytes + panels +
         panel * panel_bytes(kFormat, params.num_inputs);
}

GPU_FN constexpr uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

}  // namespace dflash::compute::gpu
