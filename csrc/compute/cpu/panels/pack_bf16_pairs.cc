// Packs bf16 weights into words of two inputs. Rows that lie in whole words are transposed as if
// they were float32 rows of half the length, because packing only moves bits.
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstring>

#include "base/dtype.h"
#include "compute/cpu/panels/pack.h"

namespace dflash::compute {
namespace {

uint16_t load_bits(const std::byte* from) {
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return bits;
}

void store_bits(uint16_t bits, std::byte* to) { std::memcpy(to, &bits, sizeof(bits)); }

// Packs words from `first_word` on and an odd last input, element by element, for all outputs.
void pack_elements(const MatrixView& matrix, uint32_t first_word, uint32_t first_output,
                   uint32_t width, std::byte* packed) {
  const uint32_t num_outputs = std::min(width, matrix.outputs - first_output);
  const uint32_t whole = matrix.inputs / 2 * 2;
  for (uint32_t k = 2 * first_word; k < matrix.inputs; ++k) {
    const std::byte* from =
        matrix.data + 2 * (first_output * matrix.output_stride + k * matrix.input_stride);
    std::byte* step =
        packed + size_t{2} * width * (k < whole ? k / 2 * 2 : k) + (k < whole ? k % 2 * 2 : 0);
    const size_t distance = k < whole ? 4 : 2;  // bytes from one output to the next
    for (uint32_t o = 0; o < num_outputs; ++o)
      store_bits(load_bits(from + 2 * o * matrix.output_stride), step + o * distance);
  }
}

}  // namespace

void pack_bf16_pairs(const MatrixView& matrix, WeightFormat format, uint32_t panel, uint32_t width,
                     std::byte* packed) {
  const uint32_t first_output = panel * width;
  if (matrix.outputs - first_output < width)
    std::memset(packed, 0, panel_bytes(format, matrix.inputs, width));
  uint32_t words = 0;
  if (matrix.input_stride == 1 && matrix.output_stride % 2 == 0 && matrix.inputs >= 2) {
    words = matrix.inputs / 2;
    const MatrixView pairs{matrix.data, WeightFormat::kF32,       matrix.outputs,
                           words,       matrix.output_stride / 2, 1};
    pack_panel(pairs, WeightFormat::kF32, panel, width, packed);  // copies the bits unchanged
  }
  pack_elements(matrix, words, first_output, width, packed);
}

size_t bf16_row_bytes(uint32_t count) { return 4 * ((size_t{count} + 1) / 2); }

void encode_bf16_row(const float* from, uint32_t count, std::byte* to) {
  // A value beyond bf16's range is no error here: it becomes infinity and shows in the reply.
  static_cast<void>(
      convert(Dtype::kF32, reinterpret_cast<const std::byte*>(from), Dtype::kBF16, to, count));
  if (count % 2 != 0) store_bits(0, to + 2 * size_t{count});
}

}  // namespace dflash::compute
