// Turns rows of a matrix in any format into float32, and quantises at load. GGUF's block types are
// in dequantize_blocks.cc.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/dequantize.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

// Adding and subtracting 1.5 * 2^23 rounds to an integer, half to even.
constexpr float kRounding = 12582912.0f;

void widen_row(const MatrixView& matrix, uint32_t output, float* values) {
  const Dtype dtype = dtype_of(matrix.format);
  const int64_t element = static_cast<int64_t>(dtype_bytes(dtype));
  const std::byte* row = matrix.data + output * matrix.output_stride * element;
  if (matrix.input_stride == 1) return widen(dtype, row, values, matrix.inputs);
  for (uint32_t i = 0; i < matrix.inputs; ++i)
    widen(dtype, row + i * matrix.input_stride * element, values + i, 1);
}

void dequantize_fp8(const MatrixView& matrix, uint32_t output, const uint8_t* row, float* values) {
  const std::byte* scales =
      matrix.scales + output / outputs_per_scale(matrix) * matrix.scales_stride;
  for (uint32_t i = 0; i < matrix.inputs; ++i) {
    float scale;
    std::memcpy(&scale, scales + size_t{i} / kFp8BlockWidth * sizeof(float), sizeof(float));
    values[i] = e4m3_to_f32(row[i]) * scale;
  }
}

void dequantize_mxfp4(const MatrixView& matrix, uint32_t output, const uint8_t* row,
                      float* values) {
  const std::byte* scales = matrix.scales + output * matrix.scales_stride;
  for (uint32_t i = 0; i < matrix.inputs; ++i) {
    const uint32_t code = i % 2 == 0 ? row[i / 2] & 15u : row[i / 2] >> 4;
    values[i] = kE2m1[code] * e8m0_to_f32(static_cast<uint8_t>(scales[i / kGroupInputs]));
  }
}

void dequantize_row(const MatrixView& matrix, uint32_t output, float* values) {
  if (is_float(matrix.format)) return widen_row(matrix, output, values);
  const auto* row = reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride);
  if (matrix.format == WeightFormat::kFp8E4m3B128)
    return dequantize_fp8(matrix, output, row, values);
  if (matrix.format == WeightFormat::kMxfp4) return dequantize_mxfp4(matrix, output, row, values);
  const FormatFacts& facts = format_facts(matrix.format);
  for (uint32_t i = 0; i < matrix.inputs; i += facts.block, row += facts.block_bytes) {
    if (!has_panels(matrix.format))
      internal::dequantize_mapped_block(matrix.format, row, values + i);
    else if (facts.block == 32)
      internal::dequantize_block_32(matrix.format, row, values + i);
    else
      internal::dequantize_block_256(matrix.format, row, values + i);
  }
}

}  // namespace

float e8m0_to_f32(uint8_t exponent) {
  if (exponent == 255) return std::bit_cast<float>(0x7fc00000u);
  return exponent == 0 ? 0x1p-127f : std::bit_cast<float>(uint32_t{exponent} << 23);
}

float e4m3_to_f32(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, exponent = magnitude >> 3, mantissa = magnitude & 7u;
  const float sign = (code & 0x80u) != 0 ? -1.0f : 1.0f;
  if (magnitude == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  if (exponent == 0) return sign * (static_cast<float>(mantissa) * 0x1p-9f);
  return sign * std::ldexp(static_cast<float>(8 + mantissa), static_cast<int>(exponent) - 10);
}

float int4_scale(uint32_t word) { return std::bit_cast<float>(word & ~31u); }

void dequantize(const MatrixView& matrix, uint32_t first_output, uint32_t num_outputs,
                float* values) {
  if (!is_plain(matrix)) {
    std::vector<std::byte> made;
    return dequantize(plain_rows(matrix, first_output, num_outputs, made), 0, num_outputs, values);
  }
  for (uint32_t o = 0; o < num_outputs; ++o)
    dequantize_row(matrix, first_output + o, values + size_t{o} * matrix.inputs);
}

float quantize_group(const float* values, float limit, int8_t* integers) {
  float lanes[8] = {};  // a maximum per lane, so that the compiler needs no reordering to vectorise
  for (uint32_t i = 0; i < kGroupInputs; i += 8) {
    for (uint32_t lane = 0; lane < 8; ++lane)
      lanes[lane] = std::max(lanes[lane], std::fabs(values[i + lane]));
  }
  const float scale = *std::max_element(lanes, lanes + 8) / limit;
  for (uint32_t i = 0; i < kGroupInputs; ++i) {
    const float quotient = scale == 0.0f ? 0.0f : std::clamp(values[i] / scale, -limit, limit);
    integers[i] = static_cast<int8_t>(static_cast<int32_t>((quotient + kRounding) - kRounding));
  }
  return scale;
}

void requantize_row(WeightFormat format, float* values, uint32_t count) {
  const float limit = format == WeightFormat::kInt8G32 ? 127.0f : 7.0f;
  for (uint32_t begin = 0; begin < count; begin += kGroupInputs) {
    const uint32_t size = std::min(kGroupInputs, count - begin);
    float group[kGroupInputs] = {};
    int8_t integers[kGroupInputs];
    std::copy_n(values + begin, size, group);
    const float scale = quantize_group(group, limit, integers);
    for (uint32_t i = 0; i < size; ++i) values[begin + i] = static_cast<float>(integers[i]) * scale;
  }
}

std::vector<float> widen_vector(const VectorView& vector, uint32_t padded_count) {
  if (vector.data == nullptr) return {};
  std::vector<float> wide(padded_count, 0.0f);
  const int64_t step = vector.stride * static_cast<int64_t>(dtype_bytes(vector.dtype));
  for (uint32_t i = 0; i < vector.count; ++i)
    widen(vector.dtype, vector.data + i * step, &wide[i], 1);
  return wide;
}

}  // namespace dflash::compute
