// The instruction-set seam of the CPU backend: one table of kernels per set. Everything above it
// (grouping, threads, loading, range checks) is portable; everything below it is
// canonical_products.h, instantiated once per set.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "compute/experts/ffn_spec.h"
#include "compute/formats/weight_format.h"
#include "compute/numerics.h"

namespace dflash::compute {

struct MatrixView;  // formats/matrix_view.h

// inputs per fma chain: the K block of f32-canonical
inline constexpr uint32_t kChainLength = 256;
// panels one kernel call may span; bounds its tile on the stack
inline constexpr uint32_t kMaxGroupPanels = 16;
// up to here weights are widened in registers, row by row of weights
inline constexpr uint32_t kFewRows = 4;
// rows of one kernel call: eight tiles of twelve share a block of weights
inline constexpr uint32_t kMaxCallRows = 96;

// A run of consecutive panels of a packed matrix (pack.h).
struct PanelRun {
  const std::byte* first;
  WeightFormat format;
  size_t panel_bytes;   // from one panel to the next
  uint32_t num_panels;  // 1..kMaxGroupPanels
  uint32_t num_inputs;  // K
  const float* bias;    // [num_panels * panel_width]; null: none
  // where the run begins that this thread most likely reads afterwards; null: unknown
  const std::byte* next = nullptr;
};

// Up to kMaxCallRows rows of one expert through the gate and up panels and the activation.
struct GateUpTile {
  PanelRun panels;  // with a gate: panels alternate gate, up
  const FfnSpec* spec;
  const void* const* rows;  // [num_rows] -> K inputs as the set encodes them
  uint32_t num_rows;
  // [num_rows] -> [(num_panels / matrices) * panel_width] float32, or encoded (gate_up_encodes);
  // written
  void* const* intermediate;
};

// The same rows through the down panels: y[i] = fma(weights[i], down, y[i]), rows in order (one row
// may occur twice).
struct DownTile {
  PanelRun panels;
  const void* const* rows;  // [num_rows] -> K intermediate values as the set encodes them
  uint32_t num_rows;
  const float* weights;  // [num_rows]
  float* const* sums;    // [num_rows] -> [num_panels * panel_width], updated
};

// The kernels of one numerics class on one instruction set.
struct KernelSet {
  NumericsClass numerics;
  uint32_t panel_width;  // outputs per panel
  // How weights are laid into panels where not as pack_panel does (pack.h), in as many bytes; else
  // null.
  void (*pack)(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
               std::byte* packed);
  // How rows reach the matrix kernels: `encode` turns `count` float32 values into
  // encoded_bytes(count) bytes, 64-byte aligned. Both null: rows stay float32.
  size_t (*encoded_bytes)(uint32_t count);
  void (*encode)(const float* from, uint32_t count, std::byte* to);
  // Whether gate_up writes intermediate values as `encode` would, because it can panel by panel:
  // encoded_bytes(panel_width) each.
  bool gate_up_encodes;
  void (*gate_up)(const GateUpTile&);
  void (*down)(const DownTile&);
  // The products of up to kMaxCallRows rows with a run of panels, dropped: what benchmarks hold a
  // layer against.
  void (*multiply_only)(const PanelRun& panels, const void* const* rows, uint32_t num_rows);
  // Replaces every NaN by 0x7fc00000: which payload survives an fma is the compiler's choice, the
  // class fixes the bits. `count` is a multiple of panel_width.
  void (*canonicalize_nan)(float* values, size_t count);
};

// One per class that a group of instructions has kernels for (kernels/kernels_<group>.cc).
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
