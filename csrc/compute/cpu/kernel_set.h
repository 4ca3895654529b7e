// The seam between the CPU backend and instruction sets: one table of kernels per set and class.
// What is above it (grouping, threads, loading, range checks) is portable. What is below it is
// expert_tiles.h and the products of a class, instantiated once per set.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/experts/ffn_spec.h"
#include "compute/formats/weight_format.h"
#include "compute/numerics.h"

namespace dflash::compute {

struct MatrixView;    // formats/matrix_view.h
struct PackedOutput;  // panels/pack.h

// Inputs per chain of fmas: the K block of f32-canonical.
inline constexpr uint32_t kChainLength = 256;
// Panels that one kernel call may span. This bounds the tile of sums on the kernel's stack.
inline constexpr uint32_t kMaxGroupPanels = 16;
// Up to this many rows, weights go from memory to registers; with more, all rows of a call pass
// over a block of them in the first-level cache.
inline constexpr uint32_t kFewRows = 4;
// Rows of one kernel call: eight tiles of twelve rows share a block of weights.
inline constexpr uint32_t kMaxCallRows = 96;

// Outputs of the widest panel of any kernel set, two vectors of AVX-512.
inline constexpr uint32_t kMaxPanelWidth = 32;
// Panels that one pass over many rows takes: one gate and its up panel, so that the sums of all
// rows stay in a near cache.
inline constexpr uint32_t kManyRowsPanels = 2;

// A run of consecutive panels of a packed matrix (pack.h). The memory belongs to the caller.
struct PanelRun {
  const std::byte* first;
  WeightFormat format;
  size_t panel_bytes;   // from the start of one panel to the next
  uint32_t num_panels;  // 1..kMaxGroupPanels
  uint32_t num_inputs;  // K
  const float* bias;    // [num_panels * panel_width]; null where there is none
  // Where the run begins that this thread most likely reads next, to prefetch; null if unknown.
  const std::byte* next = nullptr;
};

// The gate and up products and the activation of up to kMaxCallRows rows of one expert.
struct GateUpTile {
  PanelRun panels;  // with a gate, the panels of gate and up alternate
  const FfnSpec* spec;
  const void* const* rows;  // [num_rows] pointers to K inputs, as the set encodes them
  uint32_t num_rows;
  // Written: [num_rows] pointers to (num_panels / matrices) * panel_width values, which are float32
  // or, where gate_up_encodes, encoded.
  void* const* intermediate;
};

// The down products of the same rows, added to the routed sums: y[i] = fma(weights[i], down, y[i]).
// Rows are taken in order, because one row may occur twice.
struct DownTile {
  PanelRun panels;
  const void* const* rows;  // [num_rows] pointers to K intermediate values, as the set encodes them
  uint32_t num_rows;
  const float* weights;  // [num_rows], of the routing
  float* const* sums;    // [num_rows] pointers to [num_panels * panel_width] floats, updated
};

// The kernels of one numerics class on one instruction set. They may run on any thread that has the
// canonical floating-point mode.
struct KernelSet {
  NumericsClass numerics;
  uint32_t panel_width;  // outputs per panel
  // Lays weights into panels otherwise than pack_panel does (pack.h), in as many bytes; null where
  // pack_panel is right.
  void (*pack)(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
               std::byte* packed);
  // Reads one output back out of what `pack` has laid; null where unpack_output is right
  // (panels/pack.h).
  void (*unpack)(const PackedOutput& output, float* values);
  // How rows reach the matrix kernels: `encode` turns `count` float32 values into
  // encoded_bytes(count) bytes at a 64-byte aligned address. Both are null where rows stay float32.
  size_t (*encoded_bytes)(uint32_t count);
  void (*encode)(const float* from, uint32_t count, std::byte* to);
  // Whether gate_up writes intermediate values as `encode` would. It can where the encoding goes
  // panel by panel, with encoded_bytes(panel_width) bytes each.
  bool gate_up_encodes;
  void (*gate_up)(const GateUpTile&);
  void (*down)(const DownTile&);
  // The products of up to kMaxCallRows rows with a run of panels, biases added, and nothing else.
  // `tile` is [num_rows, num_panels * panel_width] and 64-byte aligned. With more than kFewRows
  // rows, the caller gives kManyRowsPanels panels at a time, so that the tile stays in a near
  // cache.
  void (*multiply)(uint32_t num_rows, const PanelRun& panels, const void* const* rows, float* tile);
  // Replaces every NaN by 0x7fc00000. Which payload survives an fma is the compiler's choice, while
  // the class fixes the bits. `count` is a multiple of panel_width.
  void (*canonicalize_nan)(float* values, size_t count);
};

// The sets of kernels/kernels_<group>.cc and kernels_int8_<group>.cc: one for each class that a
// group of instructions computes.
extern const KernelSet kScalarCanonical, kScalarInt8;
#if defined(__x86_64__)
extern const KernelSet kAvx2Canonical, kAvx2Int8;
extern const KernelSet kAvx512Canonical, kAvx512Int8;
extern const KernelSet kAvx512VnniInt8;
extern const KernelSet kAvx512Bf16Pairs;
#elif defined(__aarch64__)
extern const KernelSet kNeonCanonical, kNeonInt8;
extern const KernelSet kNeonDotprodInt8;
extern const KernelSet kNeonI8mmInt8;
extern const KernelSet kNeonBf16Pairs;
#endif

}  // namespace dflash::compute
