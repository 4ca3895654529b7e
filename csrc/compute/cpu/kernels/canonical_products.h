// The kernels of f32-canonical, written once over a vector type V. Included by kernels_<set>.cc
// only; V is a type of its own per set, so that no two files instantiate the same symbol. There is
// no std:: code here, because its instantiations could be linked into portable callers.
//
// A kernel multiplies M rows of one expert with N outputs, in panels of two vectors, over K inputs.
// Each output is summed over blocks of 256 inputs: one chain of fmas per block from +0 with
// ascending k, and the block sums added in ascending order. Few rows (few_rows.h) are bound by
// reading the weights, many rows (many_rows.h) by fma throughput. Both perform the same chain on
// the same float32 weights, so that the number of rows changes no bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "compute/cpu/kernels/expert_tiles.h"
#include "compute/cpu/kernels/grid_formats.h"
#include "compute/cpu/kernels/many_rows.h"
#include "compute/cpu/kernels/pair_formats.h"

namespace dflash::compute {

// Multiplies `num_rows` rows with a run of panels into tile [num_rows][num_panels * panel_width].
using MultiplyFunction = void (*)(uint32_t num_rows, const PanelRun& run, const float* const* rows,
                                  float* tile);
// The two kernels of one resident format: up to kFewRows rows, and more.
struct FormatKernels {
  MultiplyFunction few, many;
};

template <class V, class W>
constexpr FormatKernels float_kernels() {
  return {run_few<V, FloatKernel<V, W>>, run_many_floats<V, W>};
}
template <class V, class Q, WeightFormat kFormat>
constexpr FormatKernels quantized_kernels() {
  return {run_few<V, QuantizedKernel<V, Q, kFormat>>, run_many<V, QuantizedBlock<V, Q, kFormat>>};
}
template <class V, template <class, WeightFormat> class Q, WeightFormat kFormat>
constexpr FormatKernels quantized_kernels() {
  return quantized_kernels<V, Q<V, kFormat>, kFormat>();
}

template <class V>
inline constexpr FormatKernels kFormatKernels[kNumWeightFormats] = {
    float_kernels<V, float>(),
    float_kernels<V, typename V::F16>(),
    float_kernels<V, typename V::BF16>(),
    quantized_kernels<V, ByteFormat, WeightFormat::kInt8G32>(),
    quantized_kernels<V, NibbleFormat, WeightFormat::kInt4G32>(),
    quantized_kernels<V, Fp8Format<V>, WeightFormat::kFp8E4m3B128>(),
    quantized_kernels<V, NibbleFormat, WeightFormat::kMxfp4>(),
    quantized_kernels<V, ByteFormat, WeightFormat::kQ8_0>(),
    quantized_kernels<V, NibbleFormat, WeightFormat::kQ4_0>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kQ4K>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kQ5K>(),
    quantized_kernels<V, SixBitFormat<V>, WeightFormat::kQ6K>(),
    // gguf_mxfp4 differs from mxfp4 in its files only; panels of both are equal.
    quantized_kernels<V, NibbleFormat, WeightFormat::kMxfp4>(),
    quantized_kernels<V, NibbleFormat, WeightFormat::kIq4Nl>(),
    quantized_kernels<V, NibbleFormat, WeightFormat::kIq4Xs>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kQ4_1>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kQ5_0>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kQ5_1>(),
    quantized_kernels<V, GridFormat, WeightFormat::kIq3Xxs>(),
    quantized_kernels<V, GridFormat, WeightFormat::kIq3S>(),
    quantized_kernels<V, GridFormat, WeightFormat::kIq2Xxs>(),
    quantized_kernels<V, GridFormat, WeightFormat::kIq2Xs>(),
    quantized_kernels<V, GridFormat, WeightFormat::kIq2S>(),
    {nullptr, nullptr}, // the formats without panels
    {nullptr, nullptr},
    {nullptr, nullptr},
    {nullptr, nullptr},
    {nullptr, nullptr},
    quantized_kernels<V, PairFormat, WeightFormat::kQ3K>(),
    quantized_kernels<V, PairFormat, WeightFormat::kQ2K>(),
    quantized_kernels<V, AffineFormat, WeightFormat::kInt4Zp>(),
};

// The products of f32-canonical.
template <class V>
struct CanonicalProducts {
  static constexpr NumericsClass kNumerics = NumericsClass::kF32Canonical;
  static constexpr size_t (*kEncodedBytes)(uint32_t) = nullptr;  // rows stay float32
  static constexpr void (*kEncode)(const float*, uint32_t, std::byte*) = nullptr;
  static constexpr bool kGateUpEncodes = false;

  static void store(typename V::F values, void* row, size_t column) {
    V::store(static_cast<float*>(row) + column, values);
  }

  static void multiply(uint32_t num_rows, const PanelRun& run, const void* const* rows,
                       float* tile) {
    const FormatKernels& kernels = kFormatKernels<V>[static_cast<uint8_t>(run.format)];
    const float* const* inputs = reinterpret_cast<const float* const*>(rows);
    (num_rows <= kFewRows ? kernels.few : kernels.many)(num_rows, run, inputs, tile);
  }
};

template <class V>
constexpr KernelSet make_canonical_set() {
  return make_kernel_set<V, CanonicalProducts<V>>();
}

}  // namespace dflash::compute
