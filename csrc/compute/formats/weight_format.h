// The formats in which weights are stored in checkpoints and kept in memory. Every format has one
// written formula that turns its bits into float32 (dequantize.h); f32-canonical computes with
// exactly those values.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.h"
#include "base/result.h"

namespace dflash::compute {

// The first three are the Dtypes, with their values. Values stay within a process and its plug-ins;
// names travel.
enum class WeightFormat : uint8_t {
  kF32 = 0,
  kF16 = 1,
  kBF16 = 2,
  kInt8G32 = 3,      // made at load from f32, f16 or bf16: a float32 scale per output and 32 inputs
  kInt4G32 = 4,      // made likewise, with integers in [-7, 7]
  kFp8E4m3B128 = 5,  // e4m3 (finite only); a float32 scale per square of 128 x 128 lies apart
  // The mxfp4 of safetensors: pairs of e2m1, the low nibble first; a scale of 2^(b - 127) per 32
  // inputs lies apart.
  kMxfp4 = 6,
  kQ8_0 = 7,  // this and those below are block types of GGUF
  kQ4_0 = 8,
  kQ4K = 9,
  kQ5K = 10,
  kQ6K = 11,
  kGgufMxfp4 = 12,
  kIq4Nl = 13,
  kIq4Xs = 14,
  kQ4_1 = 15,
  kQ5_0 = 16,
  kQ5_1 = 17,
  kIq3Xxs = 18,  // this and the four below choose groups of values from grids (grid_table.h)
  kIq3S = 19,
  kIq2Xxs = 20,
  kIq2Xs = 21,
  kIq2S = 22,
  kIq1S = 23,  // this and the four below have no kernels (has_panels)
  kIq1M = 24,
  kTq1_0 = 25,
  kTq2_0 = 26,
  kNvfp4 = 27,
  kQ3K = 28,
  kQ2K = 29,
  // Four-bit integers with a scale and a zero point per 32 inputs, which AWQ, GPTQ and
  // compressed-tensors become (plain_rows.h). A block has a word and 16 bytes of codes, the low
  // nibble first. The word is a float32 scale whose five lowest bits are the zero point.
  kInt4Zp = 30,
};
inline constexpr uint8_t kNumWeightFormats = 31;
inline constexpr uint32_t kGroupInputs = 32;     // inputs per scale of int8_g32, int4_g32 and mxfp4
inline constexpr uint32_t kFp8BlockWidth = 128;  // outputs and inputs per scale of fp8_e4m3_b128

// What is known about a format.
struct FormatFacts {
  const char* name;
  uint32_t block;        // inputs of a block; rows are whole numbers of blocks where `is_stored`
  uint32_t block_bytes;  // bytes of a block's values, and of scales inside it
  // Scales that lie apart: scale_bytes for each scale_outputs x scale_inputs values; all 0 if none.
  uint32_t scale_outputs, scale_inputs, scale_bytes;
  bool is_stored;  // false for a format that is only ever made at load
  // Whether a weight is a small integer times a scale, less an offset, where the scale and the
  // offset each belong to 32 inputs at most.
  bool has_integer_codes;
};
const FormatFacts& format_facts(WeightFormat format);
inline const char* format_name(WeightFormat format) { return format_facts(format).name; }
// Errors: kUnsupported naming the formats that exist.
Result<WeightFormat> parse_weight_format(const std::string& name);

constexpr bool is_float(WeightFormat format) { return static_cast<uint8_t>(format) < kNumDtypes; }
constexpr WeightFormat format_of(Dtype dtype) { return static_cast<WeightFormat>(dtype); }
// Whether kernels read panels of the format. The weights of the others stay mapped; where a call
// needs them, they become panels of float32.
constexpr bool has_panels(WeightFormat format) {
  switch (format) {
    case WeightFormat::kIq1S:
    case WeightFormat::kIq1M:
    case WeightFormat::kTq1_0:
    case WeightFormat::kTq2_0:
    case WeightFormat::kNvfp4: return false;
    default:                   return true;
  }
}
// The format of the panels from which kernels compute.
constexpr WeightFormat panel_format(WeightFormat format) {
  return has_panels(format) ? format : WeightFormat::kF32;
}
// The Dtype of a float format.
constexpr Dtype dtype_of(WeightFormat format) { return static_cast<Dtype>(format); }
// Whether an offset of the group is subtracted from code * scale.
constexpr bool is_affine(WeightFormat format) {
  switch (format) {
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
    case WeightFormat::kQ2K:
    case WeightFormat::kInt4Zp: return true;
    default:                    return false;
  }
}
// Bytes of the values of one row; `inputs` is a multiple of the block.
uint64_t row_bytes(WeightFormat format, uint32_t inputs);

// Where a worker's experts lie: packed in memory of its own, or only in the mapped checkpoint, from
// which panels are packed anew for every batch.
enum class WeightsLayout : uint8_t { kPacked, kMapped };
// Errors: kInvalidArgument naming the two layouts.
Result<WeightsLayout> parse_weights_layout(const std::string& name);

// The formats that a layer keeps: gate and up in one, down in another, because GGUF's mixtures
// differ there.
struct ResidentFormats {
  WeightFormat gate_up = WeightFormat::kF32;
  WeightFormat down = WeightFormat::kF32;

  ResidentFormats() = default;
  ResidentFormats(WeightFormat both) : gate_up(both), down(both) {}
  ResidentFormats(WeightFormat gate_up_format, WeightFormat down_format)
      : gate_up(gate_up_format), down(down_format) {}
  ResidentFormats(Dtype both) : ResidentFormats(format_of(both)) {}
  bool operator==(const ResidentFormats&) const = default;
};
// Parses one format for all ("bf16"), or that of gate and up and that of down ("q4_k+q6_k"). Errors
// are those of parse_weight_format.
Result<ResidentFormats> parse_resident_formats(const std::string& text);

}  // namespace dflash::compute
