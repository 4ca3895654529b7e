// The kernel of gate, up and down for experts with many rows: a grouped GEMM in float32. A block
// computes 64 slots x 64 outputs, a thread 8 x 4 of them, from tiles of 64 inputs in shared memory.
// Every output is one chain of fmas per 256 inputs, and the sums of the chains are added in
// ascending order; that order is what defines the bits of f32-canonical. The 64 outputs are two
// panels: gate and up of the same 32 outputs, or two neighbouring panels of a single matrix.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/project.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kManyThreads = 128;
inline constexpr uint32_t kManyOutputs = 64;
// Inputs per step: two groups of weights for each of the 64 outputs, which is one group per thread.
inline constexpr uint32_t kManyInputs = 64;
inline constexpr uint32_t kThreadRows = 8;
inline constexpr uint32_t kThreadColumns = 4;
static_assert(kManyThreads == 2 * kManyOutputs && kManyOutputs == 2 * kPanelWidth &&
              kManyInputs == 2 * kGroup);
static_assert(kManyInputs == kManyTileRows, "finish_tile() reuses the weights' tile");

struct ManyTiles {
  SharedArray<float, kManyInputs * kManyTileRows> inputs;  // [input, slot]
  SharedArray<float, kManyInputs * kManyOutputs> weights;  // [input, output]
};

// Decodes the weights of a step into their tile. Thread t has output t % 64 and group t / 64.
// `panel` null: an output that does not exist, whose weights are zeros.
template <WeightFormat kFormat>
GPU_FN void fill_weights(const unsigned char* panel, uint32_t begin, uint32_t num_inputs,
                         ManyTiles& tiles) {
  const uint32_t column = thread_index() % kManyOutputs, half = thread_index() / kManyOutputs;
  const uint32_t input = begin + half * kGroup;
  if (input >= num_inputs) return;
  float weights[kGroup] = {};
  if (panel != nullptr) {
    const Record record{panel + input / kChain * chain_bytes(kFormat) +
                        column % kPanelWidth * kUnitBytes};
    decode_group<kFormat>(record, input % kChain / kGroup, weights);
  }
  GPU_UNROLL
  for (uint32_t i = 0; i < kGroup; ++i)
    tiles.weights.at((half * kGroup + i) * kManyOutputs + column) = weights[i];
}

// Copies the inputs of a step into their tile. Thread t has slot t % 64 and half t / 64 of the
// inputs.
GPU_FN void fill_inputs(const float* row, uint32_t begin, uint32_t num_inputs, ManyTiles& tiles) {
  const uint32_t slot = thread_index() % kManyTileRows,
                 first = thread_index() / kManyTileRows * (kManyInputs / 2);
  GPU_UNROLL
  for (uint32_t i = 0; i < kManyInputs / 2; i += 4) {
    if (begin + first + i >= num_inputs) return;
    // Rows are padded to 16 bytes, so a load beyond the last input stays inside its row.
    const Float4 inputs = load_device_16<Float4>(row + begin + first + i);
    GPU_UNROLL
    for (uint32_t j = 0; j < 4; ++j)
      tiles.inputs.at((first + i + j) * kManyTileRows + slot) = inputs.values[j];
  }
}

// Where a thread's 8 x 4 outputs lie in the block's 64 x 64: slots thread_row() to thread_row() +
// 7, and columns thread_column() and the next one, in both panels.
GPU_FN uint32_t thread_row() { return thread_index() / 16 * kThreadRows; }
GPU_FN uint32_t thread_column() { return thread_index() % 16 * 2; }

// Adds the products of one step to the thread's sums, one fma each, inputs ascending.
GPU_FN void multiply_step(uint32_t num_inputs, ManyTiles& tiles, float (*sums)[kThreadColumns]) {
  const uint32_t row = thread_row(), column = thread_column();
  GPU_UNROLL_4
  for (uint32_t k = 0; k < num_inputs; ++k) {
    const Float4 low = load_16<Float4>(&tiles.inputs.at(k * kManyTileRows + row));
    const Float4 high = load_16<Float4>(&tiles.inputs.at(k * kManyTileRows + row + 4));
    float weights[kThreadColumns];
    GPU_UNROLL
    for (uint32_t c = 0; c < kThreadColumns; ++c) {
      weights[c] = tiles.weights.at(k * kManyOutputs + c / 2 * kPanelWidth + column + c % 2);
    }
    GPU_UNROLL
    for (uint32_t r = 0; r < kThreadRows; ++r) {
      const float input = r < 4 ? low.values[r % 4] : high.values[r % 4];
      GPU_UNROLL
      for (uint32_t c = 0; c < kThreadColumns; ++c)
        sums[r][c] = fused(weights[c], input, sums[r][c]);
    }
  }
}

// The panel, the first or the second of the block, whose weights this thread decodes. Null: its
// outputs do not exist.
template <WeightFormat kFormat>
GPU_FN const unsigned char* own_panel(const ProjectionParams& params, const Tile& tile) {
  const uint32_t which = thread_index() % kManyOutputs / kPanelWidth;
  if (is_gated(params))
    return panel_of<kFormat>(params, tile.expert,
                             which == 0 ? params.first_panels : params.second_panels, block_x());
  const uint32_t panel = block_x() * 2 + which;
  return panel < num_panels(params.num_outputs)
             ? panel_of<kFormat>(params, tile.expert, params.first_panels, panel)
             : nullptr;
}

// Writes the block's sums out, or what the activation makes of them. The sums, [slot, 64 columns],
// come through shared memory: so the code of the activation exists once and not 32 times unrolled,
// and neighbouring threads write neighbouring outputs.
GPU_FN void finish_sums(const ProjectionParams& params, const Tile& tile,
                        SharedArray<float, kManyTileRows * kManyOutputs>& sums) {
  const bool is_paired = is_gated(params);
  const uint32_t width = is_paired ? kPanelWidth : kManyOutputs;
  for (uint32_t i = thread_index(); i < tile.num_slots * width; i += kManyThreads) {
    const uint32_t slot = i / width, column = i % width;
    finish_output(params, tile.expert, tile.first_slot + slot, block_x() * width + column,
                  sums.at(slot * kManyOutputs + column),
                  is_paired ? sums.at(slot * kManyOutputs + kPanelWidth + column) : 0.0f);
  }
}

// Brings the threads' totals together in shared memory, where the weights' tile was, and finishes
// them.
GPU_FN void finish_tile(const ProjectionParams& params, const Tile& tile,
                        const float (*totals)[kThreadColumns], ManyTiles& tiles) {
  GPU_UNROLL
  for (uint32_t r = 0; r < kThreadRows; ++r) {
    GPU_UNROLL
    for (uint32_t c = 0; c < kThreadColumns; ++c) {
      tiles.weights.at((thread_row() + r) * kManyOutputs + c / 2 * kPanelWidth + thread_column() +
                       c % 2) = totals[r][c];
    }
  }
  sync_block();
  finish_sums(params, tile, tiles.weights);
}

template <WeightFormat kFormat>
GPU_FN void project_many(const ProjectionParams& params) {
  GPU_SHARED(ManyTiles, tiles);
  if (block_y() >= *params.num_tiles) return;  // the whole block
  const Tile tile = params.tiles[block_y()];
  const unsigned char* panel = own_panel<kFormat>(params, tile);
  const float* row = input_of(
      params, tile.first_slot + smaller(thread_index() % kManyTileRows, tile.num_slots - 1));

  float totals[kThreadRows][kThreadColumns] = {}, sums[kThreadRows][kThreadColumns] = {};
  for (uint32_t begin = 0; begin < params.num_inputs; begin += kManyInputs) {
    fill_weights<kFormat>(panel, begin, params.num_inputs, tiles);
    fill_inputs(row, begin, params.num_inputs, tiles);
    sync_block();
    const uint32_t end = smaller(begin + kManyInputs, params.num_inputs);
    multiply_step(end - begin, tiles, sums);
    if (end % kChain == 0 || end == params.num_inputs) {
      GPU_UNROLL
      for (uint32_t i = 0; i < kThreadRows * kThreadColumns; ++i) {
        float& sum = sums[i / kThreadColumns][i % kThreadColumns];
        float& total = totals[i / kThreadColumns][i % kThreadColumns];
        total = end <= kChain ? sum : add(total, sum);
        sum = 0.0f;
      }
    }
    sync_block();
  }
  finish_tile(params, tile, totals, tiles);
}

}  // namespace dflash::compute::gpu
