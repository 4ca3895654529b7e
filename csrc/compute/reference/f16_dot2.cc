// The codes of rows and of weights in every format, and their dot product.
// SPDX-License-Identifier: Apache-2.0
#include "compute/reference/f16_dot2.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/dtype.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/plain_rows.h"
#include "compute/reference/int8_groups.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kBlock = 256;  // inputs per chain
constexpr uint32_t kGroup = 32;   // inputs per scale of a row

// Returns 2^e such that the largest magnitude of the group is in [2^(e + 14), 2^(e + 15)), but at
// least 2^-126, so that the scale is a normal float32.
float scale_of(const float* values, size_t count) {
  float largest = 0.0f;
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(values[i]));
  }
  return largest < 0x1p-112f ? 0x1p-126f : std::ldexp(1.0f, std::ilogb(largest) - 14);
}

float sum_of(const float* codes, size_t count) {
  float sums[kGroup] = {};
  std::copy_n(codes, count, sums);
  for (uint32_t width = kGroup; width > 1; width /= 2) {
    for (uint32_t i = 0; i < width / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  }
  return sums[0];
}

HalfWeights of_integers(const MatrixView& matrix, WeightFormat resident) {
  IntegerWeights integers = integer_weights(matrix, resident);
  HalfWeights found{integers.inputs,
                    integers.group_inputs,
                    {},
                    std::move(integers.scales),
                    std::move(integers.offsets)};
  for (int32_t code : integers.codes) found.codes.push_back(static_cast<float>(code));
  return found;
}

HalfWeights of_fp8(const MatrixView& matrix) {
  HalfWeights found{matrix.inputs, kGroup, {}, {}, {}};
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    const auto* row = reinterpret_cast<const uint8_t*>(matrix.data + o * matrix.output_stride);
    const std::byte* scales = matrix.scales + o / outputs_per_scale(matrix) * matrix.scales_stride;
    for (uint32_t i = 0; i < matrix.inputs; ++i) {
      found.codes.push_back(e4m3_to_f32(row[i]));
      if (i % kGroup != 0) continue;
      float scale;
      std::memcpy(&scale, scales + size_t{i} / kFp8BlockWidth * sizeof(float), sizeof(float));
      found.scales.push_back(scale);
    }
  }
  return found;
}

}  // namespace

HalfCodes half_codes(const float* values, size_t num_inputs) {
  HalfCodes found;
  for (size_t begin = 0; begin < num_inputs; begin += kGroup) {
    const size_t count = std::min<size_t>(kGroup, num_inputs - begin);
    const float scale = scale_of(values + begin, count);
    for (size_t i = begin; i < begin + count; ++i) {
      found.codes.push_back(std::isnan(scale) ? 0.0f : f16_to_f32(f32_to_f16(values[i] / scale)));
    }
    found.scales.push_back(scale);
    found.sums.push_back(sum_of(found.codes.data() + begin, count));
  }
  return found;
}

HalfWeights half_weights(const MatrixView& matrix, WeightFormat resident) {
  if (resident == WeightFormat::kFp8E4m3B128) return of_fp8(matrix);
  if (!is_float(resident)) return of_integers(matrix, resident);
  HalfWeights found{matrix.inputs, kGroup, {}, {}, {}};
  std::vector<float> values(matrix.inputs);
  for (uint32_t o = 0; o < matrix.outputs; ++o) {
    dequantize(matrix, o, 1, values.data());
    const HalfCodes row = half_codes(values.data(), values.size());
    found.codes.insert(found.codes.end(), row.codes.begin(), row.codes.end());
    found.scales.insert(found.scales.end(), row.scales.begin(), row.scales.end());
  }
  return found;
}

float f16_dot2(const HalfWeights& weights, size_t output, const HalfCodes& row) {
  const float* codes = weights.codes.data() + output * weights.inputs;
  const size_t first_group = output * weights.num_groups();
  float total = 0.0f, chain = 0.0f;
  for (uint32_t begin = 0; begin < weights.inputs; begin += weights.group_inputs) {
    if (begin % kBlock == 0) {
      total = begin <= kBlock ? chain : total + chain;
      chain = 0.0f;
    }
    float dot = 0.0f;
    for (uint32_t i = begin; i < std::min(begin + weights.group_inputs, weights.inputs); ++i)
      dot = std::fmaf(codes[i], row.codes[i], dot);
    const size_t group = first_group + begin / weights.group_inputs, row_group = begin / kGroup;
    const float row_scale = row.scales[row_group];
    chain = std::fmaf(dot, weights.scales[group] * row_scale, chain);
    if (!weights.offsets.empty())
      chain = std::fmaf(0.0f - weights.offsets[group],
                        row_scale * (weights.group_inputs == kGroup
                                         ? row.sums[row_group]
                                         : sum_of(row.codes.data() + begin, weights.group_inputs)),
                        chain);
  }
  return weights.inputs <= kBlock ? chain : total + chain;
}

}  // namespace dflash::compute
