// The parameters of the kernels: plain structs, passed by value, the same for nvcc, hipcc and the
// simulator. Pointers are device addresses. All lists of a batch lie in device memory, so that no
// launch depends on their contents.
//
// Three words of routing: a *pair* is a row and one of its experts, numbered in order of arrival,
// row by row. A *slot* is the place of a pair once the pairs are grouped by ascending expert, and
// within an expert in order of arrival. A *tile* is a few neighbouring slots of one expert, which
// one block multiplies with a panel.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "compute/experts/ffn_spec.h"

namespace dflash::compute::gpu {

inline constexpr uint32_t kPanelWidth = 32;  // outputs of a panel: one per lane of a sub-group
inline constexpr uint32_t kChain = 256;      // inputs per fma chain (f32-canonical)
inline constexpr uint32_t kFewTileRows = 4;  // slots of a tile of the few-row kernels
// The same in the bf16 classes, whose tiles are those of the matrix units.
inline constexpr uint32_t kHalfFewTileRows = 16;
inline constexpr uint32_t kManyTileRows = 64;  // slots of a tile of the many-row kernels
// An expert with more pairs than this goes to the many-row kernels.
inline constexpr uint32_t kMostFewPairs = 16;
// Shared memory of a block of bf16_wgmma: four stages of 32 KiB, and what aligning them takes.
inline constexpr uint32_t kWgmmaSharedBytes = 129 * 1024;
inline constexpr uint64_t kInRange = ~uint64_t{0};

struct Tile {
  uint32_t expert;
  uint32_t first_slot;
  uint32_t num_slots;
};

struct WidenParams {
  // [num_rows, row_size] in dtype; may be a peer's memory: each element is read once
  const void* source;
  float* rows;  // [num_rows, row_stride]
  uint32_t num_rows;
  uint32_t row_size;
  uint32_t row_stride;
  Dtype dtype;
};

// Converts rows, or intermediate rows, to records of classes int8-groups and f16-dot2
// (record_layout.h).
struct QuantizeParams {
  // [num_rows, source_stride] in dtype; may be a peer's memory: each element is read once
  const void* source;
  unsigned char* records;  // [num_rows, num_chains(row_size)]
  uint32_t num_rows;
  uint32_t row_size;
  uint32_t source_stride;
  Dtype dtype;
};

// Converts rows to bf16, padded with zeros, for the classes that multiply bf16.
struct NarrowParams {
  const void* source;  // [num_rows, row_size] in dtype, as above
  uint16_t* rows;      // [num_rows, row_stride] bf16
  uint32_t num_rows;
  uint32_t row_size;
  uint32_t row_stride;
  Dtype dtype;
};

struct RoutingParams {
  const uint16_t* row_counts;  // [num_rows]
  const uint16_t* expert_ids;  // [num_pairs], each < num_experts
  uint32_t num_rows;
  uint32_t num_pairs;
  uint32_t num_experts;
  uint32_t few_tile_rows;   // slots of a tile of the few-row kernels
  uint32_t* row_begins;     // [num_rows + 1] a row's first pair
  uint32_t* pair_rows;      // [num_pairs]
  uint32_t* expert_counts;  // [num_experts]
  uint32_t* slot_pairs;     // [num_pairs] slot -> pair
  uint32_t* pair_slots;     // [num_pairs] pair -> slot
  uint32_t* row_slots;      // [num_pairs] from row_begins[r] on: the row's slots ascending
  uint32_t* num_tiles;      // [2] of the few-row and of the many-row kernels
  Tile* few_tiles;
  Tile* many_tiles;
};

// An expert's memory has its gate panels, up panels and down panels, then the biases in float32,
// padded with zeros to whole panels.
struct ProjectionParams {
  FfnSpec spec;
  bool is_gate_up;  // gate and up with the activation; or down
  const Tile* tiles;
  const uint32_t* num_tiles;  // blocks whose y is not below it leave at once
  const uint32_t* slot_pairs;
  const uint32_t* pair_rows;  // gate and up read row pair_rows[slot_pairs[slot]]; null: row `slot`
  const float* inputs;        // [rows or slots, input_stride]
  // classes int8-groups and f16-dot2 read these instead: records, [rows or slots] x
  // num_chains(num_inputs)
  const unsigned char* codes;
  // the bf16 classes read these instead: bf16, padded with zeros to input_stride
  const uint16_t* halves;
  float* outputs;  // [slots, output_stride]
  // gate and up of the bf16 classes write these instead: what down reads as halves
  uint16_t* half_outputs;
  uint32_t num_inputs;
  uint32_t num_outputs;
  // values, a multiple of 4; of 8 in the bf16 classes, whose intermediate rows are written up to it
  uint32_t input_stride;
  uint32_t output_stride;
  const unsigned char* experts;  // [num_experts] x expert_bytes
  uint64_t expert_bytes;
  uint64_t first_panels;   // offsets inside an expert: gate (or up alone, or down)
  uint64_t second_panels;  // up, where there is a gate
  uint64_t first_bias;     // kNoBias: none
  uint64_t second_bias;
};
inline constexpr uint64_t kNoBias = ~uint64_t{0};

struct CombineParams {
  const float* downs;  // [slots, out_size]
  const uint32_t* row_begins;
  const uint32_t* row_slots;
  const uint32_t* slot_pairs;
  const float* weights;  // [num_pairs] in order of arrival
  void* reply;           // [num_rows, out_size] in dtype
  // smallest row * out_size + column that dtype cannot hold; kInRange: none
  uint64_t* first_out_of_range;
  uint32_t num_rows;
  uint32_t out_size;
  Dtype dtype;
};

// The vendor's compiler must lay these out as the host's does, which writes them.
static_assert(sizeof(FfnSpec) == 32 && offsetof(FfnSpec, gate) == 13 &&
              offsetof(FfnSpec, up_limit) == 28);
static_assert(sizeof(Tile) == 12 && sizeof(WidenParams) == 32 &&
              offsetof(WidenParams, dtype) == 28);
static_assert(sizeof(QuantizeParams) == 32 && offsetof(QuantizeParams, dtype) == 28);
static_assert(sizeof(NarrowParams) == 32 && offsetof(NarrowParams, dtype) == 28);
static_assert(sizeof(RoutingParams) == 104 && offsetof(RoutingParams, many_tiles) == 96);
static_assert(offsetof(ProjectionParams, is_gate_up) == 32 &&
              offsetof(ProjectionParams, tiles) == 40);
static_assert(sizeof(ProjectionParams) == 176 && offsetof(ProjectionParams, second_bias) == 168 &&
              offsetof(ProjectionParams, num_inputs) == 112);
static_assert(sizeof(CombineParams) == 72 && offsetof(CombineParams, dtype) == 64);

// The parameters by the kernels' stems, for the tables that macros write.
using PlainParams_widen_rows = WidenParams;
using PlainParams_quantize_rows = QuantizeParams;
using PlainParams_halve_rows = QuantizeParams;
using PlainParams_narrow_rows = NarrowParams;
using PlainParams_begin_routing = RoutingParams;
using PlainParams_count_pairs = RoutingParams;
using PlainParams_list_pairs = RoutingParams;
using PlainParams_order_rows = RoutingParams;
using PlainParams_combine = CombineParams;

}  // namespace dflash::compute::gpu
