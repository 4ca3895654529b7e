// Finds scales that are NaN or infinite and values that cannot be quantised, while the rows are in
// the cache for packing.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/value_checks.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "compute/formats/dequantize.h"
#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

bool is_finite_f16(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, sizeof(bits));
  return (bits & 0x7c00u) != 0x7c00u;
}

// Whether a block of int4_zp has a scale below 2^123, whose product with every zero point is
// finite.
bool has_usable_scale(const uint8_t* block) {
  return (internal::load_u32(block) & 0x7f800000u) < 0x7d000000u;
}

// Returns the first input of a row of blocks for which `is_finite` is false, or `inputs`. As a rule
// all are good, so that the first pass has no early exit and vectorises.
template <class Check>
uint32_t first_bad_of(const uint8_t* row, uint32_t inputs, const FormatFacts& facts,
                      Check is_finite) {
  bool all_finite = true;
  const uint8_t* block = row;
  for (uint32_t i = 0; i < inputs; i += facts.block, block += facts.block_bytes)
    all_finite &= is_finite(block);
  if (all_finite) return inputs;
  for (uint32_t i = 0; i < inputs; i += facts.block, row += facts.block_bytes) {
    if (!is_finite(row)) return i;
  }
  return inputs;
}

// Returns the first input of a row whose block has a scale that cannot be used, or matrix.inputs.
uint32_t first_bad_block(const MatrixView& matrix, const uint8_t* row) {
  const FormatFacts& facts = format_facts(matrix.format);
  switch (matrix.format) {
    case WeightFormat::kQ4K:
    case WeightFormat::kQ5K:
    case WeightFormat::kQ4_1:
    case WeightFormat::kQ5_1:
      return first_bad_of(row, matrix.inputs, facts, [](const uint8_t* block) {
        return is_finite_f16(block) && is_finite_f16(block + 2);
      });
    case WeightFormat::kQ6K:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return is_finite_f16(block + 208); });
    case WeightFormat::kIq1M:
      return first_bad_of(row, matrix.inputs, facts, [](const uint8_t* block) {
        return (internal::iq1_m_scale(block) & 0x7c00u) != 0x7c00u;
      });
    case WeightFormat::kTq1_0:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return is_finite_f16(block + 52); });
    case WeightFormat::kTq2_0:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return is_finite_f16(block + 64); });
    case WeightFormat::kNvfp4: return matrix.inputs;  // its scales have no NaN
    case WeightFormat::kQ3K:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return is_finite_f16(block + 108); });
    case WeightFormat::kQ2K:
      return first_bad_of(row, matrix.inputs, facts, [](const uint8_t* block) {
        return is_finite_f16(block + 80) && is_finite_f16(block + 82);
      });
    case WeightFormat::kInt4Zp: return first_bad_of(row, matrix.inputs, facts, has_usable_scale);
    case WeightFormat::kGgufMxfp4:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return block[0] != 255; });
    default:
      return first_bad_of(row, matrix.inputs, facts,
                          [](const uint8_t* block) { return is_finite_f16(block); });
  }
}

// Returns true if one of `count` values has all the bits of `mask`, the exponent of NaN and
// infinity. The loop has no early exit, so that it vectorises.
template <class T>
bool any_has(T mask, const uint8_t* values, uint32_t count) {
  T found = 0;
  for (uint32_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, values + sizeof(T) * i, sizeof(T));
    found = static_cast<T>(found | static_cast<T>((value & mask) == mask));
  }
  return found != 0;
}

uint32_t first_bad_fp8(const MatrixView& matrix, uint32_t output, const uint8_t* row) {
  const std::byte* scales =
      matrix.scales + output / outputs_per_scale(matrix) * matrix.scales_stride;
  for (uint32_t begin = 0; begin < matrix.inputs; begin += kFp8BlockWidth) {
    float scale;
    std::memcpy(&scale, scales + size_t{begin} / kFp8BlockWidth * sizeof(float), sizeof(float));
    if (!std::isfinite(scale)) return begin;
    const uint32_t end = std::min(begin + kFp8BlockWidth, matrix.inputs);
    if (!any_has<uint8_t>(0x7f, row + begin, end - begin)) continue;
    return static_cast<uint32_t>(
        std::find_if(row + begin, row + end, [](uint8_t code) { return (code & 0x7fu) == 0x7fu; }) -
        row);
  }
  return matrix.inputs;
}

uint32_t first_bad_mxfp4(const MatrixView& matrix, uint32_t output) {
  const std::byte* scales = matrix.scales + output * matrix.scales_stride;
  for (uint32_t i = 0; i < matrix.inputs; i += kGroupInputs) {
    if (scales[i / kGroupInputs] == std::byte{255}) return i;
  }
  return matrix.inputs;
}

bool is_finite_row(const MatrixView& matrix, uint32_t output) {
  const auto* values = reinterpret_cast<const uint8_t*>(matrix.data);
  if (matrix.format == WeightFormat::kF32)
    return !any_has<uint32_t>(0x7f800000u, values + 4 * output * matrix.output_stride,
                              matrix.inputs);
  const uint16_t exponent = matrix.format == WeightFormat::kF16 ? 0x7c00u : 0x7f80u;
  return !any_has<uint16_t>(exponent, values + 2 * output * matrix.output_stride, matrix.inputs);
}

uint32_t first_bad_float(const MatrixView& matrix, uint32_t output, std::vector<float>& row) {
  if (matrix.input_stride == 1 && is_finite_row(matrix, output)) return matrix.inputs;
  row.resize(matrix.inputs);
  dequantize(matrix, output, 1, row.data());
  for (uint32_t i = 0; i < matrix.inputs; ++i) {
    if (!std::isfinite(row[i])) return i;
  }
  return matrix.inputs;
}

}  // namespace

Status check_stored(const char* name, const MatrixView& matrix) {
  const auto invalid = [name](const std::string& what) {
    return Error{ErrorCode::kInvalidArgument, name + what};
  };
  if (static_cast<uint8_t>(matrix.format) >= kNumWeightFormats)
    return invalid(" has an unknown format");
  const FormatFacts& facts = format_facts(matrix.format);
  if (!facts.is_stored)
    return invalid(std::string(" cannot be stored in ") + facts.name + "; it is made at load");
  if (matrix.inputs % facts.block != 0) {
    return Error{ErrorCode::kUnsupported,
                 std::string(name) + " has rows of " + std::to_string(matrix.inputs) + " inputs; " +
                     facts.name + " needs a multiple of " + std::to_string(facts.block)};
  }
  if ((facts.scale_bytes != 0 || !is_plain(matrix)) != (matrix.scales != nullptr)) {
    return invalid(std::string(" in ") + facts.name +
                   (matrix.scales != nullptr ? " has scales apart" : " lacks its scales"));
  }
  return ok();
}

Status check_resident(const char* name, const MatrixView& matrix, WeightFormat resident) {
  if (matrix.data == nullptr || matrix.format == resident || resident == WeightFormat::kF32)
    return ok();
  if (!format_facts(resident).is_stored && is_float(matrix.format)) return ok();
  return Error{ErrorCode::kUnsupported, std::string(name) + " is stored in " +
                                            format_name(matrix.format) +
                                            ", which resident format " + format_name(resident) +
                                            " cannot hold exactly; keep this layer in f32"};
}

Status check_panels(const char* name, WeightFormat resident) {
  if (has_panels(resident)) return ok();
  return Error{ErrorCode::kUnsupported,
               std::string(name) + " in " + format_name(resident) +
                   " cannot be packed, because no kernel reads this format; use weights_layout: "
                   "mapped, under which every call dequantises it"};
}

namespace {

// Returns the first input of a row for which no finite result can come, or matrix.inputs.
uint32_t first_bad_input(const MatrixView& matrix, uint32_t output, std::vector<float>& wide) {
  if (is_float(matrix.format)) return first_bad_float(matrix, output, wide);
  const auto* row = reinterpret_cast<const uint8_t*>(matrix.data + output * matrix.output_stride);
  if (matrix.format == WeightFormat::kFp8E4m3B128) return first_bad_fp8(matrix, output, row);
  if (matrix.format == WeightFormat::kMxfp4) return first_bad_mxfp4(matrix, output);
  return first_bad_block(matrix, row);
}

}  // namespace

Status check_values(const char* name, const MatrixView& matrix, WeightFormat resident,
                    uint32_t first_output, uint32_t num_outputs) {
  if (is_float(matrix.format) && is_float(resident)) return ok();
  std::vector<std::byte> made;
  const bool is_made = !is_plain(matrix);
  const MatrixView rows = is_made ? plain_rows(matrix, first_output, num_outputs, made) : matrix;
  std::vector<float> wide;
  for (uint32_t o = first_output; o < first_output + num_outputs; ++o) {
    const uint32_t bad = first_bad_input(rows, is_made ? o - first_output : o, wide);
    if (bad == matrix.inputs) continue;
    return Error{ErrorCode::kCheckpoint,
                 std::string(name) + ": output " + std::to_string(o) + ", input " +
                     std::to_string(bad) + ": " +
                     (is_float(matrix.format) ? "a value" : "a scale or value") + " in " +
                     format_name(matrix.format) + " is NaN or infinite; the checkpoint is damaged"};
  }
  return ok();
}

}  // namespace dflash::compute
