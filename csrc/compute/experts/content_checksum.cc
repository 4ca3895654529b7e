// The checksums of a tensor, by lines from where they lie or gathered into a buffer, of an expert
// and of a shard, and the reader that takes them without packing.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/content_checksum.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

// Outputs of a line where outputs lie side by side: as many as two cache lines hold of a 16-bit
// format. It is a multiple of every panel's width, so that the panels of a line are packed while
// the line is in the cache.
constexpr uint32_t kLineOutputs = 64;
constexpr uint32_t kLineElements = 1024;  // elements of a bias that make a line
constexpr uint64_t kFirstScaleLine = uint64_t{1} << 63;

uint64_t line_term(uint64_t index, std::span<const std::byte> line) {
  return mix_bits(mix_bits(index) + checksum(line));
}

bool lies_by_rows(const MatrixView& matrix) {
  return !is_float(matrix.format) || matrix.input_stride == 1;
}

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

// Returns `count` elements, which lie `step` bytes apart, side by side: where they are if they
// already lie so, otherwise copied to `buffer`.
std::span<const std::byte> gathered(const std::byte* from, int64_t step, uint32_t count,
                                    size_t element_bytes, std::byte* buffer) {
  if (step == static_cast<int64_t>(element_bytes)) return {from, count * element_bytes};
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(buffer + i * element_bytes, from + i * step, element_bytes);
  return {buffer, count * element_bytes};
}

// Bytes of one output with its share of scales that lie apart. Steps of the reader are sized by it.
size_t output_bytes(const MatrixView& matrix) {
  const FormatFacts& facts = format_facts(matrix.format);
  const size_t values = row_bytes(matrix.format, matrix.inputs);
  if (facts.scale_bytes == 0) return values;
  return values + matrix.inputs / facts.scale_inputs * facts.scale_bytes / facts.scale_outputs;
}

}  // namespace

uint64_t mix_bits(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

void MatrixChecksum::add(const MatrixView& part, uint32_t part_begin, uint32_t first,
                         uint32_t count) {
  if (lies_by_rows(part))
    add_rows(part, part_begin, first, first + count);
  else
    add_columns(part, part_begin, first, first + count);
  if (format_facts(part.format).scale_bytes != 0)
    add_scales(part, part_begin, first, first + count);
}

void MatrixChecksum::add_rows(const MatrixView& part, uint32_t part_begin, uint32_t first,
                              uint32_t end) {
  const size_t num_bytes = row_bytes(part.format, part.inputs);
  // Strides of float formats count elements, those of the others bytes.
  const int64_t element = is_float(part.format) ? format_facts(part.format).block_bytes : 1;
  for (uint32_t output = first; output < end; ++output) {
    const std::byte* row = part.data + (output - part_begin) * part.output_stride * element;
    sum_ += line_term(output, {row, num_bytes});
  }
}

void MatrixChecksum::add_columns(const MatrixView& part, uint32_t part_begin, uint32_t first,
                                 uint32_t end) {
  const size_t element_bytes = format_facts(part.format).block_bytes;
  const auto element = static_cast<int64_t>(element_bytes);
  std::byte buffer[kLineOutputs * sizeof(float)];
  for (uint32_t begin = divide_up(first, kLineOutputs) * kLineOutputs; begin < end;
       begin += kLineOutputs) {
    const uint32_t in_part = begin - part_begin;
    const uint32_t count = std::min(kLineOutputs, part.outputs - in_part);
    for (uint32_t input = 0; input < part.inputs; ++input) {
      const std::byte* from =
          part.data + (in_part * part.output_stride + input * part.input_stride) * element;
      sum_ += line_term(uint64_t{begin / kLineOutputs} * part.inputs + input,
                        gathered(from, part.output_stride * element, count, element_bytes, buffer));
    }
  }
}

void MatrixChecksum::add_scales(const MatrixView& part, uint32_t part_begin, uint32_t first,
                                uint32_t end) {
  const FormatFacts& facts = format_facts(part.format);
  const size_t num_bytes = size_t{divide_up(part.inputs, facts.scale_inputs)} * facts.scale_bytes;
  const uint32_t outputs = outputs_per_scale(part), part_row = part_begin / outputs;
  for (uint32_t row = divide_up(first, outputs); row * outputs < end; ++row)
    sum_ += line_term(kFirstScaleLine + row,
                      {part.scales + (row - part_row) * part.scales_stride, num_bytes});
}

uint32_t outputs_per_line(const MatrixView& matrix) {
  if (!lies_by_rows(matrix)) return kLineOutputs;
  return outputs_per_scale(matrix);
}

uint64_t vector_checksum(const VectorView& vector) {
  if (vector.data == nullptr) return 0;
  const size_t element = dtype_bytes(vector.dtype);
  const int64_t step = vector.stride * static_cast<int64_t>(element);
  std::byte buffer[kLineElements * sizeof(float)];
  uint64_t sum = 0;
  for (uint32_t begin = 0; begin < vector.count; begin += kLineElements) {
    const uint32_t count = std::min(kLineElements, vector.count - begin);
    sum += line_term(begin / kLineElements,
                     gathered(vector.data + begin * step, step, count, element, buffer));
  }
  return sum;
}

uint64_t ExpertChecksum::finish(const ExpertWeights& weights) const {
  uint64_t expert = 0;
  for (const uint64_t tensor :
       {gate.value(), up.value(), down.value(), vector_checksum(weights.gate_bias),
        vector_checksum(weights.up_bias), vector_checksum(weights.down_bias)})
    expert = mix_bits(expert ^ tensor);
  return expert;
}

uint64_t shard_checksum(std::span<const uint64_t> experts) {
  uint64_t shard = 0;
  for (const uint64_t expert : experts) shard = mix_bits(shard ^ expert);
  return shard;
}

Result<bool> ContentReader::read(size_t num_bytes) {
  const MatrixView* const matrices[] = {&weights_.gate, &weights_.up, &weights_.down};
  MatrixChecksum* const sums[] = {&sums_.gate, &sums_.up, &sums_.down};
  while (matrix_ < 3 && next_output_ >= matrices[matrix_]->outputs) {
    ++matrix_;
    next_output_ = 0;
  }
  if (matrix_ == 3) return true;
  DFLASH_TRY(read_outputs_of(*matrices[matrix_], *sums[matrix_], num_bytes));
  return matrix_ == 2 && next_output_ >= weights_.down.outputs;
}

// Reads the next outputs of a matrix, in whole lines.
Status ContentReader::read_outputs_of(const MatrixView& matrix, MatrixChecksum& sum,
                                      size_t num_bytes) {
  const uint32_t at_once = outputs_read_at_once(matrix, 1);
  const uint32_t unit = outputs_per_line(matrix);
  const size_t wanted = num_bytes / (std::max<size_t>(output_bytes(matrix), 1) * unit) * unit;
  const auto count = static_cast<uint32_t>(std::min<size_t>(
      std::clamp<size_t>(wanted, unit, at_once == 0 ? SIZE_MAX : std::max(at_once, unit)),
      matrix.outputs - next_output_));
  MatrixView part = matrix;
  if (at_once != 0) DFLASH_TRY(read_outputs(next_output_, count, part, buffer_));
  sum.add(part, at_once == 0 ? 0 : next_output_, next_output_, count);
  next_output_ += count;
  return ok();
}

uint64_t ContentReader::value() const { return sums_.finish(weights_); }

}  // namespace dflash::compute
