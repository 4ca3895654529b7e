// Takes the checksum of a tensor by lines, from where they lie or gathered into a buffer.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/matrix_checksum.h"

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

}  // namespace dflash::compute
