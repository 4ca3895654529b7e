// The kernel of the matrix-unit classes for experts with many rows: a grouped GEMM. A block
// computes 64 slots x two panels of 32 outputs: gate and up of the same outputs, or two
// neighbouring panels of a single matrix. It multiplies 64 inputs at a time from one of two buffers
// in shared memory; meanwhile the next step's weights are decoded into registers, and then stored
// into the other buffer. The sums over 256 inputs start from +0 and are added in ascending order.
// What bounds the rate is the matrix units: 64 x 64 sums read 32 bytes of shared memory per 1024
// multiply-adds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/bf16_stage.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kHalfManyThreads = 128;
// Inputs per step: two groups of weights for each of the 64 outputs, which is one group per thread.
inline constexpr uint32_t kHalfManyInputs = 64;
inline constexpr uint32_t kHalfOctets = kHalfManyInputs / kUnitHalves;
inline constexpr uint32_t kHalfColumns = 2 * kPanelWidth;
// Units from one octet of the rows to the next, so that stores use different banks.
inline constexpr uint32_t kHalfRowStep = kManyTileRows + 4;
// Units of the rows that a thread stores per step: every second unit of one row.
inline constexpr uint32_t kHalfRowUnits = kHalfOctets / 2;
static_assert(kHalfManyThreads == 2 * kHalfColumns && kHalfManyThreads == 2 * kManyTileRows);

struct ManyBuffers {
  SharedArray<Unit, 2 * kHalfOctets * kHalfRowStep> rows;     // [buffer, octet, slot]
  SharedArray<Unit, 2 * kHalfOctets * kHalfColumns> weights;  // [buffer, octet, output]
};
union ManyHalves {
  ManyBuffers buffers;
  SharedArray<float, kManyTileRows * kHalfColumns> totals;  // [slot, output], at the end
};

// Which part of the 64 x 64 sums a team has, counted in tiles.
template <class TileOps>
struct ManyPart {
  static constexpr uint32_t kRows = 2;
  static constexpr uint32_t kColumns = TileOps::kLanes / 16;  // 4 teams of 32 x 32, or 2 of 32 x 64
  static constexpr uint32_t kAcross = kHalfColumns / (kColumns * kTileSide);
  typename TileOps::Sums sums[kRows][kColumns];

  GPU_FN static uint32_t first_row() {
    return thread_index() / TileOps::kLanes / kAcross * kRows * kTileSide;
  }
  GPU_FN static uint32_t first_column() {
    return thread_index() / TileOps::kLanes % kAcross * kColumns * kTileSide;
  }
};

struct ManyStaged {
  Unit weights[kGroupUnits];
  Unit rows[kHalfRowUnits];
};

// What a thread brings into a buffer. Of the weights thread t has output t % 64 and group t / 64 of
// the step; of the rows it has slot t / 2 and its units t % 2, 2 + t % 2 and so on.
template <WeightFormat kFormat>
GPU_FN ManyStaged fetch_many(const ProjectionParams& params, const unsigned char* panel,
                             const uint16_t* row, uint32_t begin) {
  ManyStaged staged{};
  const uint32_t column = thread_index() % kHalfColumns,
                 input = begin + thread_index() / kHalfColumns * kGroup;
  GPU_UNROLL
  for (uint32_t j = 0; j < kHalfRowUnits; ++j) {
    staged.rows[j] = row_unit(params, row, begin + (thread_index() % 2 + 2 * j) * kUnitHalves);
  }
  if (panel != nullptr && input < params.num_inputs) {
    const Record record{panel + input / kChain * chain_bytes(kFormat) +
                        column % kPanelWidth * kUnitBytes};
    narrow_group<kFormat>(record, input % kChain / kGroup, staged.weights);
  }
  return staged;
}

GPU_FN void store_many(const ManyStaged& staged, uint32_t buffer, ManyBuffers& buffers) {
  const uint32_t column = thread_index() % kHalfColumns,
                 octet = thread_index() / kHalfColumns * kGroupUnits;
  GPU_UNROLL
  for (uint32_t u = 0; u < kGroupUnits; ++u) {
    buffers.weights.at((buffer * kHalfOctets + octet + u) * kHalfColumns + column) =
        staged.weights[u];
  }
  GPU_UNROLL
  for (uint32_t j = 0; j < kHalfRowUnits; ++j) {
    buffers.rows.at((buffer * kHalfOctets + thread_index() % 2 + 2 * j) * kHalfRowStep +
                    thread_index() / 2) = staged.rows[j];
  }
}

template <class TileOps>
GPU_FN void multiply_many(uint32_t buffer, ManyBuffers& buffers, ManyPart<TileOps>& part) {
  using Part = ManyPart<TileOps>;
  GPU_UNROLL
  for (uint32_t octet = 0; octet < kHalfOctets; octet += kTileOctets) {
    typename TileOps::Operand rows[Part::kRows];
    GPU_UNROLL
    for (uint32_t r = 0; r < Part::kRows; ++r) {
      rows[r] = TileOps::load(
          buffers.rows,
          (buffer * kHalfOctets + octet) * kHalfRowStep + Part::first_row() + r * kTileSide,
          kHalfRowStep);
    }
    GPU_UNROLL
    for (uint32_t c = 0; c < Part::kColumns; ++c) {
      const auto weights = TileOps::load(
          buffers.weights,
          (buffer * kHalfOctets + octet) * kHalfColumns + Part::first_column() + c * kTileSide,
          kHalfColumns);
      GPU_UNROLL
      for (uint32_t r = 0; r < Part::kRows; ++r)
        TileOps::multiply_add(part.sums[r][c], rows[r], weights);
    }
  }
}

// Adds the sums of a chain to the totals and begins the next chain.
template <class TileOps>
GPU_FN void end_chain(bool is_first, ManyPart<TileOps>& part, ManyPart<TileOps>& totals) {
  using Part = ManyPart<TileOps>;
  GPU_UNROLL
  for (uint32_t t = 0; t < Part::kRows * Part::kColumns; ++t) {
    GPU_UNROLL
    for (uint32_t i = 0; i < TileOps::kValues; ++i) {
      float& sum = part.sums[t / Part::kColumns][t % Part::kColumns].values[i];
      float& total = totals.sums[t / Part::kColumns][t % Part::kColumns].values[i];
      total = is_first ? sum : add(total, sum);
      sum = 0.0f;
    }
  }
}

// Writes the totals out. They go through shared memory, so that gate and up of an output meet in
// one thread and neighbouring threads write neighbouring outputs.
template <class TileOps>
GPU_FN void finish_many(const ProjectionParams& params, const Tile& tile,
                        const ManyPart<TileOps>& part, ManyHalves& shared) {
  using Part = ManyPart<TileOps>;
  GPU_UNROLL
  for (uint32_t t = 0; t < Part::kRows * Part::kColumns; ++t) {
    const uint32_t row = Part::first_row() + t / Part::kColumns * kTileSide,
                   column = Part::first_column() + t % Part::kColumns * kTileSide;
    GPU_UNROLL
    for (uint32_t i = 0; i < TileOps::kValues; ++i) {
      shared.totals.at((row + TileOps::row(i)) * kHalfColumns + column + TileOps::column(i)) =
          part.sums[t / Part::kColumns][t % Part::kColumns].values[i];
    }
  }
  sync_block();
  for (uint32_t i = thread_index(); i < tile.num_slots * kPanelWidth; i += kHalfManyThreads) {
    const uint32_t slot = i / kPanelWidth, column = i % kPanelWidth;
    finish_column(params, tile.expert, tile.first_slot + slot, column,
                  shared.totals.at(slot * kHalfColumns + column),
                  shared.totals.at(slot * kHalfColumns + kPanelWidth + column));
  }
}

template <class TileOps, WeightFormat kFormat>
GPU_FN void bf16_many(const ProjectionParams& params) {
  if constexpr (TileOps::kExists) {
    GPU_SHARED(ManyHalves, shared);
    if (block_y() >= *params.num_tiles) return;  // the whole block
    const Tile tile = params.tiles[block_y()];
    const unsigned char* panel =
        paired_panel<kFormat>(params, tile.expert, thread_index() % kHalfColumns / kPanelWidth);
    const uint16_t* row = halves_of(params, tile, thread_index() / 2);
    ManyPart<TileOps> sums, totals;
    ManyStaged staged;
    uint32_t buffer = 0;  // the one that is stored into next
    for (uint32_t begin = 0;; begin += kHalfManyInputs, buffer ^= 1) {
      const bool has_more = begin < params.num_inputs;
      if (has_more) staged = fetch_many<kFormat>(params, panel, row, begin);
      if (begin != 0) {
        multiply_many<TileOps>(buffer ^ 1, shared.buffers, sums);
        if (begin % kChain == 0 || !has_more) end_chain<TileOps>(begin <= kChain, sums, totals);
      }
      if (!has_more) break;
      store_many(staged, buffer, shared.buffers);
      sync_block();
    }
    sync_block();  // totals take the buffers' place
    finish_many<TileOps>(params, tile, totals, shared);
  } else {
    stop_kernel();
  }
}

}  // namespace dflash::compute::gpu
