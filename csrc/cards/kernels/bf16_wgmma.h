// Class bf16-mma, many rows, by warpgroups (sm_90a): a block of two warpgroups computes 128 slots -
// two neighbouring tiles of an expert, or one - times 128 columns: gate and up of the same 64
// outputs, or 128 outputs of one matrix. A ring of four stages of 64 inputs lies in shared memory:
// while the products of a step run asynchronously, the operands of the step after the next are
// copied or decoded into the ring. Sums of 256 inputs start from +0 and are added in ascending
// order, as in bf16_many.h, whose bits these are (docs/decisions/0018). Bounds: 128 x 128 x 64
// multiply-adds per step, 512 cycles of a multiprocessor's matrix units, against 32 KiB read from
// the L2 cache.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cards/kernels/async_copy.h"
#include "cards/kernels/bf16_stage.h"
#include "cards/kernels/warpgroup.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kWgmmaThreads = 2 * kWarpgroupThreads;
inline constexpr uint32_t kWgmmaRows = 2 * kWarpgroupRows;
inline constexpr uint32_t kWgmmaColumns = kWarpgroupOutputs;
inline constexpr uint32_t kWgmmaInputs = kOperandOctets * kUnitHalves;  // inputs of a step
inline constexpr uint32_t kWgmmaStages = 4;
// steps: stages before it are being read, by this warpgroup and by the other one
inline constexpr uint32_t kWgmmaAhead = 2;
// Floats from slot to slot of the totals, so that the eight rows of a store use different banks.
inline constexpr uint32_t kWgmmaTotals = kWgmmaColumns + 4;
// units
inline constexpr uint32_t kRingRows = kWgmmaRows * kOperandOctets,
                          kRingColumns = kWgmmaColumns * kOperandOctets;
inline constexpr uint32_t kRingStage = kRingRows + kRingColumns;
static_assert(kManyTileRows == kWarpgroupRows && kWgmmaInputs == 2 * kGroup &&
              kWgmmaThreads == 2 * kWgmmaColumns);
static_assert(kWgmmaStages >= kWgmmaAhead + 2 && kChain % kWgmmaInputs == 0);

union WgmmaShared {
  // A stage has the rows, then the columns: an operand per 64 rows, and one per 128 columns.
  SharedArray<Unit, kWgmmaStages * kRingStage> ring;
  SharedArray<float, kWgmmaRows * kWgmmaTotals> totals;  // [slot, column], at the end
};
static_assert(sizeof(WgmmaShared) + kOperandAlignment <= kWgmmaSharedBytes);

#if DFLASH_GPU_WARPGROUPS
// What a thread brings into the ring: of the columns, group thread / 128 (32 inputs) of column
// thread % 128; of the rows, unit thread % 8 of every 32nd row.
template <WeightFormat kFormat>
struct WgmmaSource {
  static constexpr uint32_t kRows = kRingRows / kWgmmaThreads;
  const unsigned char* panel;  // null: a column that does not exist
  const uint16_t* rows[kRows];

  GPU_FN static uint32_t column() { return thread_index() % kWgmmaColumns; }
  GPU_FN static uint32_t row(uint32_t i) {
    return thread_index() / kOperandOctets + i * (kWgmmaThreads / kOperandOctets);
  }
};

template <WeightFormat kFormat>
GPU_FN const unsigned char* wgmma_panel(const ProjectionParams& params, uint32_t expert,
                                        uint32_t column) {
  const bool is_second = is_gated(params) && column >= kWgmmaColumns / 2;
  const uint32_t panels =
      is_gated(params) ? kWgmmaColumns / 2 / kPanelWidth : kWgmmaColumns / kPanelWidth;
  const uint32_t panel = block_x() * panels + column / kPanelWidth % panels;
  if (panel >= num_panels(params.num_outputs)) return nullptr;
  return panel_of<kFormat>(params, expert, is_second ? params.second_panels : params.first_panels,
                           panel);
}

// Brings the weights of one step into the ring. Records hold bf16 unit by unit as the operand wants
// it, so it is copied; other formats are decoded.
template <WeightFormat kFormat>
GPU_FN void bring_weights(const ProjectionParams& params, const WgmmaSource<kFormat>& source,
                          uint32_t step, WgmmaShared& shared) {
  const uint32_t half = thread_index() / kWgmmaColumns, input = step * kWgmmaInputs + half * kGroup;
  const uint32_t first = step % kWgmmaStages * kRingStage + kRingRows;
  const bool is_there = source.panel != nullptr && input < params.num_inputs;
  const Record record{source.panel + input / kChain * chain_bytes(kFormat) +
                      source.column() % kPanelWidth * kUnitBytes};
  const uint32_t group = input % kChain / kGroup;
  if constexpr (kFormat == WeightFormat::kBF16) {
    GPU_UNROLL
    for (uint32_t u = 0; u < kGroupUnits; ++u) {
      copy_async(shared.ring.at(first + operand_unit(source.column(), half * kGroupUnits + u)),
                 is_there ? record.first + (group * kGroupUnits + u) * (kUnitBytes * kPanelWidth)
                          : nullptr);
    }
  } else {
    Unit units[kGroupUnits] = {};
    if (is_there) narrow_group<kFormat>(record, group, units);
    GPU_UNROLL
    for (uint32_t u = 0; u < kGroupUnits; ++u) {
      Warpgroup::store(
          shared.ring.at(first + operand_unit(source.column(), half * kGroupUnits + u)), units[u]);
    }
  }
}

template <WeightFormat kFormat>
GPU_FN void bring_step(const ProjectionParams& params, const WgmmaSource<kFormat>& source,
                       uint32_t step, WgmmaShared& shared) {
  const uint32_t octet = thread_index() % kOperandOctets,
                 input = step * kWgmmaInputs + octet * kUnitHalves;
  GPU_UNROLL
  for (uint32_t i = 0; i < WgmmaSource<kFormat>::kRows; ++i) {
    const bool is_there = source.rows[i] != nullptr && input < params.input_stride;
    copy_async(
        shared.ring.at(step % kWgmmaStages * kRingStage + operand_unit(source.row(i), octet)),
        is_there ? source.rows[i] + input : nullptr);
  }
  bring_weights<kFormat>(params, source, step, shared);
}

// Starts the products of one step; they are still under way when this returns.
GPU_FN void multiply_step_async(uint32_t step, WgmmaShared& shared, WarpgroupSums& sums) {
  const uint32_t stage = step % kWgmmaStages * kRingStage,
                 warpgroup = thread_index() / kWarpgroupThreads;
  const uint32_t rows =
      Warpgroup::address(shared.ring.at(stage + warpgroup * (kWarpgroupRows * kOperandOctets)));
  const uint32_t columns = Warpgroup::address(shared.ring.at(stage + kRingRows));
  Warpgroup::fence();
  GPU_UNROLL
  for (uint32_t k = 0; k < kWgmmaInputs / kProductInputs; ++k) {
    Warpgroup::multiply_add(sums, operand_descriptor(rows, k), operand_descriptor(columns, k));
  }
  Warpgroup::commit();
}

// Writes the totals out. They go through shared memory, so that gate and up of an output meet in
// one thread, neighbouring threads write neighbouring outputs, and the code of the activation
// exists once.
GPU_FN void finish_wgmma(const ProjectionParams& params, const Tile& tile,
                         const WarpgroupSums& totals, WgmmaShared& shared) {
  const uint32_t first_row = thread_index() / kWarpgroupThreads * kWarpgroupRows;
  GPU_UNROLL
  for (uint32_t i = 0; i < kWarpgroupSums; ++i) {
    shared.totals.at((first_row + warpgroup_row(i)) * kWgmmaTotals + warpgroup_output(i)) =
        totals.values[i];
  }
  sync_block();
  const uint32_t width = is_gated(params) ? kWgmmaColumns / 2 : kWgmmaColumns;
  for (uint32_t i = thread_index(); i < tile.num_slots * width; i += kWgmmaThreads) {
    const uint32_t slot = i / width, column = i % width, at = slot * kWgmmaTotals + column;
    const float second = is_gated(params) ? shared.totals.at(at + kWgmmaColumns / 2) : 0.0f;
    finish_half(params, tile.expert, tile.first_slot + slot, block_x() * width + column,
                shared.totals.at(at), second);
  }
}

// The slots of this block: those of tile `block_y()`. An even tile is taken together with the next
// one where both are of the same expert; the block of that next tile then has none.
GPU_FN Tile paired_tile(const ProjectionParams& params) {
  const uint32_t index = block_y();
  Tile tile = params.tiles[index];
  if (index % 2 == 1 && params.tiles[index - 1].expert == tile.expert) tile.num_slots = 0;
  if (index % 2 == 0 && index + 1 < *params.num_tiles) {
    const Tile next = params.tiles[index + 1];
    if (next.expert == tile.expert) tile.num_slots += next.num_slots;
  }
  return tile;
}

// Asks for the next chain's records while this one is computed with, so that decoding waits for the
// L2 cache and not for memory. The 64 threads of a panel take its lines in turn; bf16 is copied
// ahead anyway.
template <WeightFormat kFormat>
GPU_FN void prefetch_chain(const ProjectionParams& params, const WgmmaSource<kFormat>& source,
                           uint32_t chain) {
  if (kFormat == WeightFormat::kBF16 || source.panel == nullptr ||
      chain >= num_chains(params.num_inputs))
    return;
  const uint32_t own = lane_index() + thread_index() / kWgmmaColumns * kSubgroupLanes;
  for (uint32_t line = own; line < chain_bytes(kFormat) / kCacheLine; line += 2 * kSubgroupLanes) {
    prefetch(source.panel + chain * chain_bytes(kFormat) + line * kCacheLine);
  }
}

// Every step: what this thread brought two steps ago has landed and is fenced; the barrier then
// says so of all threads, and that the products of the step before last have read their stage, into
// which the step after the next goes.
template <WeightFormat kFormat>
GPU_FN WarpgroupSums multiply_tile(const ProjectionParams& params,
                                   const WgmmaSource<kFormat>& source, WgmmaShared& shared) {
  const uint32_t steps = (params.num_inputs + kWgmmaInputs - 1) / kWgmmaInputs;
  WarpgroupSums totals;
  GPU_UNROLL
  for (uint32_t step = 0; step < kWgmmaAhead; ++step) {
    if (step < steps) bring_step<kFormat>(params, source, step, shared);
    commit_copies();
  }
  for (uint32_t first = 0; first < steps; first += kChain / kWgmmaInputs) {
    WarpgroupSums sums;
    const uint32_t end = smaller(first + kChain / kWgmmaInputs, steps);
    prefetch_chain<kFormat>(params, source, first * kWgmmaInputs / kChain + 1);
    for (uint32_t step = first; step < end; ++step) {
      wait_copies<kWgmmaAhead - 1>();
      Warpgroup::fence_operands();
      sync_block();
      multiply_step_async(step, shared, sums);
      if (step + kWgmmaAhead < steps)
        bring_step<kFormat>(params, source, step + kWgmmaAhead, shared);
      commit_copies();
      Warpgroup::wait<1>(sums);
    }
    Warpgroup::wait<0>(sums);
    GPU_UNROLL
    for (uint32_t i = 0; i < kWarpgroupSums; ++i)
      totals.values[i] = first == 0 ? sums.values[i] : add(totals.values[i], sums.values[i]);
  }
  return totals;
}

template <WeightFormat kFormat>
GPU_FN void bf16_wgmma(const ProjectionParams& params) {
  GPU_DYNAMIC_SHARED(memory);
  if (block_y() >= *params.num_tiles) return;  // the whole block, here and below
  const Tile tile = paired_tile(params);
  if (tile.num_slots == 0) return;
  const uint32_t past = Warpgroup::address(*static_cast<Unit*>(memory)) % kOperandAlignment;
  auto& shared = *reinterpret_cast<WgmmaShared*>(static_cast<unsigned char*>(memory) +
                                                 (kOperandAlignment - past) % kOperandAlignment);
  using Source = WgmmaSource<kFormat>;
  Source source{wgmma_panel<kFormat>(params, tile.expert, Source::column()), {}};
  GPU_UNROLL
  for (uint32_t i = 0; i < Source::kRows; ++i)
    source.rows[i] = halves_of(params, tile, Source::row(i));
  const WarpgroupSums totals = multiply_tile<kFormat>(params, source, shared);
  sync_block();  // totals take the ring's place
  finish_wgmma(params, tile, totals, shared);
}
#else
template <WeightFormat kFormat>
GPU_FN void bf16_wgmma(const ProjectionParams&) {}
#endif

}  // namespace dflash::compute::gpu
