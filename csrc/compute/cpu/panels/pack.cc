// Packs float weights into panels. The work is bound by memory: the source is read once and the
// panel is written once.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/panels/pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/dtype.h"
#include "compute/cpu/panels/transpose.h"
#include "compute/formats/dequantize.h"

namespace dflash::compute {
namespace {

// Inputs that are transposed at a time: one cache line of a 16-bit source row, so that each line of
// the source is read once.
constexpr uint32_t kInputsAtOnce = 32;

struct Copy16 {
  static uint16_t convert(uint16_t bits) { return bits; }
};
struct Copy32 {
  static uint32_t convert(uint32_t bits) { return bits; }
};
struct WidenF16 {
  static float convert(uint16_t bits) { return f16_to_f32(bits); }
};
struct WidenBF16 {
  static float convert(uint16_t bits) { return bf16_to_f32(bits); }
};

template <class T>
T load(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// Returns which output lies at place `slot` of a packed step; the inverse of place_in_step.
uint32_t output_at(uint32_t slot, uint32_t width, bool alternates) {
  if (!alternates) return slot;
  return slot % 2 == 0 ? slot / 2 : width / 2 + slot / 2;
}

// Packs a full panel whose rows are contiguous, by whole tiles and one cache line of every row
// after the other. Returns how many inputs it has packed; the caller packs the rest.
template <class T>
uint32_t pack_tiles(const T* source, int64_t row_stride, uint32_t inputs, bool alternates,
                    uint32_t width, T* target) {
  if (width % kTile<T> != 0) return 0;
  const uint32_t whole = inputs / kInputsAtOnce * kInputsAtOnce;
  for (uint32_t k0 = 0; k0 < whole; k0 += kInputsAtOnce) {
    for (uint32_t slot = 0; slot < width; slot += kTile<T>) {
      const T* rows[kTile<T>];
      for (uint32_t i = 0; i < kTile<T>; ++i)
        rows[i] = source + output_at(slot + i, width, alternates) * row_stride + k0;
      T* steps = target + static_cast<size_t>(k0) * width + slot;
      for (uint32_t k = 0; k < kInputsAtOnce; k += kTile<T>) {
        transpose_tile(rows, steps + static_cast<size_t>(k) * width, width);
        for (const T*& row : rows) row += kTile<T>;
      }
    }
  }
  return whole;
}

template <class Source, class Target, class Conversion>
void pack(const MatrixView& matrix, bool alternates, uint32_t first_output, uint32_t width,
          std::byte* packed) {
  Target* target = reinterpret_cast<Target*>(packed);
  const uint32_t num_outputs = std::min(width, matrix.outputs - first_output);
  if (num_outputs < width) std::memset(packed, 0, sizeof(Target) * width * matrix.inputs);
  const std::byte* source = matrix.data + static_cast<int64_t>(first_output) *
                                              matrix.output_stride *
                                              static_cast<int64_t>(sizeof(Source));
  if (matrix.output_stride == 1) {  // outputs contiguous: each input is one short run
    for (uint32_t k = 0; k < matrix.inputs; ++k) {
      const std::byte* run =
          source + k * matrix.input_stride * static_cast<int64_t>(sizeof(Source));
      Target* step = target + static_cast<size_t>(k) * width;
      for (uint32_t o = 0; o < num_outputs; ++o)
        step[place_in_step(o, width, alternates)] = Conversion::convert(load<Source>(run, o));
    }
    return;
  }
  uint32_t k0 = 0;
  if constexpr (std::is_same_v<Source, Target>) {
    if (matrix.input_stride == 1 && num_outputs == width) {
      k0 = pack_tiles(reinterpret_cast<const Target*>(source), matrix.output_stride, matrix.inputs,
                      alternates, width, target);
    }
  }
  for (; k0 < matrix.inputs; k0 += kInputsAtOnce) {
    const uint32_t num_inputs = std::min(kInputsAtOnce, matrix.inputs - k0);
    for (uint32_t o = 0; o < num_outputs; ++o) {
      const std::byte* row = source + (o * matrix.output_stride + k0 * matrix.input_stride) *
                                          static_cast<int64_t>(sizeof(Source));
      Target* column =
          target + static_cast<size_t>(k0) * width + place_in_step(o, width, alternates);
      if (matrix.input_stride == 1) {
        for (uint32_t k = 0; k < num_inputs; ++k)
          column[static_cast<size_t>(k) * width] = Conversion::convert(load<Source>(row, k));
      } else {
        for (uint32_t k = 0; k < num_inputs; ++k) {
          column[static_cast<size_t>(k) * width] =
              Conversion::convert(load<Source>(row, k * matrix.input_stride));
        }
      }
    }
  }
}

// Packs a panel of any format as float32; its rows are dequantised into a buffer first.
void pack_widened(const MatrixView& matrix, uint32_t first_output, uint32_t width,
                  std::byte* packed) {
  const uint32_t num_outputs = std::min(width, matrix.outputs - first_output);
  std::vector<float> rows(size_t{num_outputs} * matrix.inputs);
  dequantize(matrix, first_output, num_outputs, rows.data());
  const MatrixView wide{reinterpret_cast<const std::byte*>(rows.data()),
                        WeightFormat::kF32,
                        num_outputs,
                        matrix.inputs,
                        matrix.inputs,
                        1};
  pack<uint32_t, uint32_t, Copy32>(wide, false, 0, width, packed);
}

}  // namespace

size_t panel_bytes(WeightFormat format, uint32_t inputs, uint32_t width) {
  if (!is_float(format)) return quantized_panel_bytes(format, inputs, width);
  return size_t{inputs} * width * dtype_bytes(dtype_of(format));
}

void pack_panel(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                std::byte* packed) {
  const uint32_t first_output = panel * width;
  if (!is_float(format)) return pack_quantized_panel(matrix, format, first_output, width, packed);
  if (!is_float(matrix.format)) return pack_widened(matrix, first_output, width, packed);
  const bool is_same = matrix.format == format;
  if (matrix.format == WeightFormat::kF32)
    return pack<uint32_t, uint32_t, Copy32>(matrix, false, first_output, width, packed);
  if (is_same)
    return pack<uint16_t, uint16_t, Copy16>(matrix, format == WeightFormat::kBF16, first_output,
                                            width, packed);
  if (matrix.format == WeightFormat::kF16)
    return pack<uint16_t, float, WidenF16>(matrix, false, first_output, width, packed);
  return pack<uint16_t, float, WidenBF16>(matrix, false, first_output, width, packed);
}

}  // namespace dflash::compute
