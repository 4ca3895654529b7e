// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/content_checksum.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "compute/formats/stored_rows.h"

namespace dflash::compute {
namespace {

// Outputs of a line where outputs lie together: what two cache lines hold of a 16-bit format, and a
// multiple of every panel's width, so that the panels of a line are packed while it is in the
// cache.
constexpr uint32_t kLineOutputs = 64;
constexpr uint32_t kLineElements = 1024;  // of a bias
constexpr uint64_t kFirstScaleLine = uint64_t{1} << 63;

// A bijection of 64 bits in which each bit depends on all (splitmix64's finaliser, Steele, Lea and
// Flood, "Fast splittable pseudorandom number generators"): two changed lines do not cancel but by
// chance.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

uint64_t line_term(uint64_t index, std::span<const std::byte> line) {
  return mix(mix(index) + checksum(line));
}

bool lies_by_rows(const MatrixView& matrix) {
  return !is_float(matrix.format) || matrix.input_stride == 1;
}

// `count` elements, `step` bytes from one to the next, side by side: where they are, or in
// `buffer`.
std::span<const std::byte> gathered(const std::byte* from, int64_t step, uint32_t count,
                                    size_t element_bytes, std::byte* buffer) {
  if (step == static_cast<int64_t>(element_bytes)) return {from, count * element_bytes};
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(buffer + i * element_bytes, from + i * step, element_bytes);
  return {buffer, count * element_bytes};
}

// Of one output, with its share of scales lying apart: what bounds a step of the reader.
size_t output_bytes(const MatrixView& matrix) {
  const FormatFacts& facts = format_facts(matrix.format);
  const size_t values = row_bytes(matrix.format, matrix.inputs);
  if (facts.scale_bytes == 0) return values;
  return values + matrix.inputs / facts.scale_inputs * facts.scale_bytes / facts.scale_outputs;
}

}  // namespace

void MatrixChecksum::add_line(uint64_t index, std::span<const std::byte> line) {
  sum_ += line_term(index, line);
}

void MatrixChecksum::add(const MatrixView& part, uint32_t part_begin, uint32_t first,
                         uint32_t count) {
  const FormatFacts& facts = format_facts(part.format);
  const uint32_t end = first + count;
  if (lies_by_rows(part)) {
    const size_t num_bytes = row_bytes(part.format, part.inputs);
    const size_t element = is_float(part.format) ? facts.block_bytes : 1;  // what strides count
    for (uint32_t output = first; output < end; ++output) {
      const size_t in_part = output - part_begin;
      add_line(output, {part.data + in_part * static_cast<size_t>(part.output_stride) * element,
                        num_bytes});
    }
  } else {
    const auto element = static_cast<int64_t>(facts.block_bytes);
    std::byte buffer[kLineOutputs * sizeof(float)];
    for (uint32_t begin = (first + kLineOutputs - 1) / kLineOutputs * kLineOutputs; begin < end;
         begin += kLineOutputs) {
      const uint32_t in_part = begin - part_begin;
      const uint32_t in_line = std::min(kLineOutputs, part.outputs - in_part);
      for (uint32_t input = 0; input < part.inputs; ++input) {
        const std::byte* from =
            part.data + (in_part * part.output_stride + input * part.input_stride) * element;
        add_line(uint64_t{begin} / kLineOutputs * part.inputs + input,
                 gathered(from, part.output_stride * element, in_line, facts.block_bytes, buffer));
      }
    }
  }
  if (facts.scale_bytes == 0) return;
  const size_t scale_row_bytes =
      size_t{(part.inputs + facts.scale_inputs - 1) / facts.scale_inputs} * facts.scale_bytes;
  const uint32_t part_row = part_begin / facts.scale_outputs;
  for (uint32_t row = (first + facts.scale_outputs - 1) / facts.scale_outputs;
       row * facts.scale_outputs < end; ++row) {
    add_line(kFirstScaleLine + row,
             {part.scales + (row - part_row) * part.scales_stride, scale_row_bytes});
  }
}

uint64_t vector_checksum(const VectorView& vector) {
  if (vector.data == nullptr) return 0;
  const size_t element = dtype_bytes(vector.dtype);
  const int64_t step = vector.stride * static_cast<int64_t>(element);
  std::byte buffer[kLineElements * sizeof(float)];
  uint64_t sum = 0;
  for (uint32_t begin = 0; begin < vector.count; begin += kLineElements) {
    sum += line_term(begin / kLineElements,
                     gathered(vector.data + begin * step, step,
                              std::min(kLineElements, vector.count - begin), element, buffer));
  }
  return sum;
}

uint64_t ExpertChecksum::finish(const ExpertWeights& weights) const {
  uint64_t expert = 0;
  for (const uint64_t tensor :
       {gate.value(), up.value(), down.value(), vector_checksum(weights.gate_bias),
        vector_checksum(weights.up_bias), vector_checksum(weights.down_bias)})
    expert = mix(expert ^ tensor);
  return expert;
}

uint64_t shard_checksum(std::span<const uint64_t> experts) {
  uint64_t shard = 0;
  for (const uint64_t expert : experts) shard = mix(shard ^ expert);
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

// The next outputs of a matrix, in whole lines.
Status ContentReader::read_outputs_of(const MatrixView& matrix, MatrixChecksum& sum,
                                      size_t num_bytes) {
  const uint32_t at_once = outputs_read_at_once(matrix, 1);
  const uint32_t unit =
      lies_by_rows(matrix) ? std::max(format_facts(matrix.format).scale_outputs, 1u) : kLineOutputs;
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
