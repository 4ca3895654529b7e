// What the kernels of the matrix-unit classes share: weights and rows on their way into a tile's
// operands as bf16, and what becomes of a finished sum. Weights are decoded to float32 by their
// format's formula and rounded to bf16 once; bf16 weights are taken as they are.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/project.h"
#include "cards/kernels/tile.h"

namespace dflash::compute::gpu {

// The 16-byte units that a group of 32 bf16 takes.
inline constexpr uint32_t kGroupUnits = kGroup / kUnitHalves;

// Rounds two floats to bf16, to nearest even; the first is in the low half of the result.
GPU_FN uint32_t narrow_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return narrow_bf16(low) | narrow_bf16(high) << 16;
#endif
}

// Makes bf16 of a stored group, a unit at a time: take(u, unit) is called for each in ascending
// order. A caller that stores units as they come keeps four registers of the result, not sixteen.
template <WeightFormat kFormat, class Take>
GPU_FN void narrow_units(const StoredGroup<kFormat>& stored, uint32_t group, const Take& take) {
  if constexpr (kFormat == WeightFormat::kBF16) {
    GPU_UNROLL
    for (uint32_t u = 0; u < kGroupUnits; ++u) take(u, stored.units[u]);
  } else {
    const GroupScale scale = group_scale<kFormat>(stored, group);
    GPU_UNROLL
    for (uint32_t u = 0; u < kGroupUnits; ++u) {
      float weights[kOctet];
      decode_octet<kFormat>(stored, scale, group, u, weights);
      Unit unit;
      GPU_UNROLL
      for (uint32_t i = 0; i < kOctet / 2; ++i)
        unit.words[i] = narrow_pair(weights[2 * i], weights[2 * i + 1]);
      take(u, unit);
    }
  }
}
template <WeightFormat kFormat>
GPU_FN void narrow_stored(const StoredGroup<kFormat>& stored, uint32_t group, Unit* units) {
  narrow_units<kFormat>(stored, group, [units](uint32_t u, const Unit& unit) { units[u] = unit; });
}

// Loads group `group` of a record and makes bf16 of it.
template <WeightFormat kFormat>
GPU_FN void narrow_group(const Record& record, uint32_t group, Unit* units) {
  narrow_stored<kFormat>(load_group<kFormat>(record, group), group, units);
}

// The row of a slot, null where the tile has no such slot.
GPU_FN const uint16_t* halves_of(const ProjectionParams& params, const Tile& tile, uint32_t slot) {
  if (slot >= tile.num_slots) return nullptr;
  const uint32_t at = tile.first_slot + slot,
                 row = params.pair_rows == nullptr ? at : params.pair_rows[params.slot_pairs[at]];
  return params.halves + uint64_t{row} * params.input_stride;
}

// Eight inputs of a row from `input` on, which is a multiple of 8; zeros beyond the row's end.
GPU_FN Unit row_unit(const ProjectionParams& params, const uint16_t* row, uint32_t input) {
  if (row == nullptr || input >= params.input_stride) return {};
  return load_device_16<Unit>(row + input);
}

// The first or the second (`which` 0 or 1) of the block's two panels: gate's and up's of the same
// 32 outputs, or two neighbouring panels of a single matrix. Null: its outputs do not exist.
template <WeightFormat kFormat>
GPU_FN const unsigned char* paired_panel(const ProjectionParams& params, uint32_t expert,
                                         uint32_t which) {
  if (is_gated(params))
    return panel_of<kFormat>(params, expert,
                             which == 0 ? params.first_panels : params.second_panels, block_x());
  const uint32_t panel = block_x() * 2 + which;
  return panel < num_panels(params.num_outputs)
             ? panel_of<kFormat>(params, expert, params.first_panels, panel)
             : nullptr;
}

// Writes one finished value. Intermediate rows are rounded to bf16, and padded with zeros to whole
// units.
GPU_FN void finish_half(const ProjectionParams& params, uint32_t expert, uint32_t slot,
                        uint32_t output, float first, float second) {
  if (!params.is_gate_up) return finish_output(params, expert, slot, output, first, second);
  if (output >= params.output_stride) return;
  const float value =
      output < params.num_outputs ? output_value(params, expert, output, first, second) : 0.0f;
  params.half_outputs[uint64_t{slot} * params.output_stride + output] =
      static_cast<uint16_t>(narrow_bf16(value));
}
// Finishes both sums that a block has in a column: they make one intermediate value where there is
// a gate, and are two outputs, a panel apart, elsewhere.
GPU_FN void finish_column(const ProjectionParams& params, uint32_t expert, uint32_t slot,
                          uint32_t column, float first, float second) {
  if (is_gated(params))
    return finish_half(params, expert, slot, block_x() * kPanelWidth + column, first, second);
  finish_half(params, expert, slot, block_x() * 2 * kPanelWidth + column, first, 0.0f);
  finish_half(params, expert, slot, (block_x() * 2 + 1) * kPanelWidth + column, second, 0.0f);
}

}  // namespace dflash::compute::gpu
