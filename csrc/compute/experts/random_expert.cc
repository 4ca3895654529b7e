// Random weights. The bytes of quantised blocks are random, and their scales are then set to small
// ones.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/random_expert.h"

#include <cstring>

#include "base/dtype.h"

namespace dflash::compute {
namespace {

// 2^-17, and the zero point 7.
constexpr uint32_t kInt4Word = (110u << 23) | 7u;

void put_f16(std::byte* at, float value) {
  const uint16_t bits = f32_to_f16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

// The factor of iq1_m lies in the top bits of four u16.
void put_iq1_m_scale(std::byte* block, float value) {
  const uint16_t bits = f32_to_f16(value);
  for (uint32_t i = 0; i < 4; ++i) {
    std::byte& top = block[49 + 2 * i];
    top = (top & std::byte{15}) | static_cast<std::byte>((bits >> (4 * i) & 15) << 4);
  }
}

}  // namespace

RandomMatrix::RandomMatrix(uint32_t outputs, uint32_t inputs, WeightFormat format,
                           std::mt19937_64& random) {
  if (!format_facts(format).is_stored) format = WeightFormat::kBF16;
  values_.resize(outputs * row_bytes(format, inputs));
  view_.data = values_.data();
  view_.format = format;
  view_.outputs = outputs;
  view_.inputs = inputs;
  view_.output_stride = is_float(format) ? inputs : static_cast<int64_t>(row_bytes(format, inputs));
  view_.input_stride = is_float(format) ? 1 : 0;
  if (is_float(format))
    fill_floats(random);
  else
    fill_blocks(random);
}

void RandomMatrix::fill_floats(std::mt19937_64& random) {
  const Dtype dtype = dtype_of(view_.format);
  std::vector<float> row(view_.inputs);
  const float scale = 1.0f / static_cast<float>(view_.inputs);
  for (uint32_t o = 0; o < view_.outputs; ++o) {
    for (float& value : row)
      value =
          scale * static_cast<float>(static_cast<int32_t>(random() >> 40) - (1 << 23)) / (1 << 23);
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(row.data()), dtype,
            values_.data() + size_t{o} * view_.inputs * dtype_bytes(dtype), view_.inputs);
  }
}

void RandomMatrix::fill_blocks(std::mt19937_64& random) {
  const FormatFacts& facts = format_facts(view_.format);
  for (std::byte& byte : values_) byte = static_cast<std::byte>(random() >> 32);
  if (facts.scale_bytes == 0) {
    for (size_t at = 0; at < values_.size(); at += facts.block_bytes)
      put_block_scales(values_.data() + at);
    return;
  }
  const uint32_t rows = (view_.outputs + facts.scale_outputs - 1) / facts.scale_outputs;
  const uint32_t columns = (view_.inputs + facts.scale_inputs - 1) / facts.scale_inputs;
  const std::vector<float> ones(size_t{rows} * columns, 1e-5f);
  scales_.assign(size_t{rows} * columns * facts.scale_bytes, std::byte{110});  // 2^-17 in mxfp4
  if (view_.format == WeightFormat::kFp8E4m3B128) {
    std::memcpy(scales_.data(), ones.data(), scales_.size());
    for (std::byte& byte : values_) byte &= std::byte{0xfe};  // excludes NaN
  }
  view_.scales = scales_.data();
  view_.scales_stride = columns * facts.scale_bytes;
}

void RandomMatrix::put_block_scales(std::byte* block) const {
  switch (view_.format) {
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1: put_f16(block + 2, 1e-5f); [[fallthrough]];
    default:                  put_f16(block, 1e-5f); return;
    case WeightFormat::kQ6K:  put_f16(block + 208, 1e-6f); return;
    case WeightFormat::kQ3K:  put_f16(block + 108, 1e-6f); return;
    case WeightFormat::kQ2K:
      put_f16(block + 80, 1e-5f);
      put_f16(block + 82, 1e-5f);
      return;
    case WeightFormat::kGgufMxfp4: block[0] = std::byte{110}; return;
    case WeightFormat::kIq1M:      put_iq1_m_scale(block, 1e-5f); return;
    case WeightFormat::kTq1_0:     put_f16(block + 52, 1e-5f); return;
    case WeightFormat::kTq2_0:     put_f16(block + 64, 1e-5f); return;
    case WeightFormat::kNvfp4:
      for (int i = 0; i < 4; ++i) block[i] = std::byte{1};
      return;
    case WeightFormat::kInt4Zp: std::memcpy(block, &kInt4Word, sizeof(kInt4Word)); return;
  }
}

RandomExpert::RandomExpert(const FfnSpec& spec, ResidentFormats formats, uint64_t seed)
    : RandomExpert(spec, formats, std::mt19937_64(seed)) {}

RandomExpert::RandomExpert(const FfnSpec& spec, ResidentFormats formats, std::mt19937_64&& random)
    : has_gate_(spec.gate != GateKind::kNone),
      gate_(spec.intermediate_size, spec.in_size, formats.gate_up, random),
      up_(spec.intermediate_size, spec.in_size, formats.gate_up, random),
      down_(spec.out_size, spec.intermediate_size, formats.down, random) {}

ExpertWeights RandomExpert::weights() const {
  ExpertWeights weights;
  if (has_gate_) weights.gate = gate_.view();
  weights.up = up_.view();
  weights.down = down_.view();
  return weights;
}

}  // namespace dflash::compute
