// The seam between paged attention and instruction sets: one table of kernels per set. What is
// above it (which rows, which tiles, threads, rounding) is portable; what is below it is
// kernels/attention_tiles.h, instantiated once per set. All tables give the same bits.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "compute/cpu/instruction_sets.h"
#include "compute/operators/attention.h"
#include "compute/operators/paged_kv.h"

namespace dflash::compute {

// Rows of one kernel call: eight tiles of twelve rows, as of the expert kernels, share what was
// widened of keys and values.
inline constexpr uint32_t kMaxAttentionRows = 96;
inline constexpr uint32_t kTileBlocks = kTileTokens / kBlockTokens;
// Few rows prefetch so many blocks ahead of those they read: 16 KiB of keys of 128 16-bit values.
inline constexpr uint32_t kAheadBlocks = 4;

// m, l and o of rows, of one tile or merged. A row that has seen no key has l = 0 and nothing else;
// any other row has l >= 1, or NaN.
struct AttentionState {
  float* largest;  // [num_rows]
  float* sums;     // [num_rows]
  float* outputs;  // [num_rows][value_stride], 64-byte aligned
};

// The keys of a tile that a row sees, counted from the tile's first.
struct KeyRange {
  uint32_t begin, end;  // begin >= end: none
};

// One tile of keys and values of one kv head, as a group of rows sees it: of query heads that share
// the kv head, at one or more positions. The memory is the caller's.
struct AttentionTile {
  // Blocks that no row's range touches are not read and may be null.
  const std::byte* key_blocks[kTileBlocks];    // each [key_size][16]
  const std::byte* value_blocks[kTileBlocks];  // each [16][value_stride]
  uint32_t key_size;
  uint32_t value_stride;
  const AttentionForm* form;
  uint32_t num_rows;            // 1..kMaxAttentionRows
  const float* const* queries;  // [num_rows] pointers to key_size floats
  const KeyRange* ranges;       // [num_rows]
  AttentionState state;         // into which the tile is merged
  float* scores;                // scratch [num_rows][kTileTokens], 64-byte aligned
  float* outputs;  // scratch [num_rows][value_stride], 64-byte aligned; with few rows only
  // The key blocks that this thread most likely reads next, to prefetch; null if unknown.
  const std::byte* next_blocks[kAheadBlocks];
};

struct AttentionKernels {
  // Up to so many rows, keys and values are widened in registers, and `outputs` is used.
  uint32_t few_rows;
  // Merges a tile into the state, for pages of each Dtype.
  void (*attend[kNumDtypes])(const AttentionTile& tile);
  // Merges the state `tile` of later tiles into `into`, row by row.
  void (*merge)(const AttentionState& tile, uint32_t num_rows, uint32_t value_stride,
                const AttentionState& into);
  // Merges sinks[num_rows], if there are any, and divides the outputs by their sums.
  void (*finish)(const AttentionState& state, uint32_t num_rows, uint32_t value_stride,
                 const float* sinks);
};

extern const AttentionKernels kScalarAttention;
#if defined(__x86_64__)
extern const AttentionKernels kAvx2Attention, kAvx512Attention;
#elif defined(__aarch64__)
extern const AttentionKernels kNeonAttention;
#endif

// The kernels of a set; those of a set's extensions are its own. The reference has those of scalar.
const AttentionKernels& attention_kernels(Isa isa);

}  // namespace dflash::compute
