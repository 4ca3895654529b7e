// Rearranges packed integers into blocks of int4_zp, and spreads the scales of FP8.
//
// AWQ packs eight outputs of one input in a word, so that eight words hold an 8 x 8 square of
// codes, which is transposed in registers. GPTQ and compressed-tensors pack eight inputs of one
// output; their words are moved as they are.
// SPDX-License-Identifier: Apache-2.0
#include "compute/formats/plain_rows.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/dtype.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kBlockBytes = 20;    // of int4_zp
constexpr uint32_t kWordCodes = 8;      // codes in a packed word
constexpr uint32_t kSymmetricZero = 8;  // where a checkpoint has no zero points
// AWQ has output 8 * w + i of word w in nibble kAwqNibble[i].
constexpr uint32_t kAwqNibble[kWordCodes] = {0, 4, 1, 5, 2, 6, 3, 7};

using Four = uint32_t __attribute__((vector_size(16)));

uint32_t word_at(const std::byte* from) {
  uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

uint32_t divide_up(uint32_t value, uint32_t by) { return (value + by - 1) / by; }

float scale_at(const MatrixView& matrix, uint32_t row, uint32_t column) {
  float scale;
  const Dtype dtype = matrix.layout.scale_dtype;
  widen(dtype, matrix.scales + row * matrix.scales_stride + column * dtype_bytes(dtype), &scale, 1);
  return scale;
}

// Scales that f16 and bf16 can hold have zeros in the bits that the zero point takes.
uint32_t group_word(const MatrixView& matrix, uint32_t output, uint32_t group) {
  const CheckpointLayout& layout = matrix.layout;
  const bool is_by_rows = layout.packing == Packing::kPackQuantized;
  const float scale =
      is_by_rows ? scale_at(matrix, output, group) : scale_at(matrix, group, output);
  uint32_t zero = kSymmetricZero;
  if (layout.zeros != nullptr) {
    const uint32_t row = is_by_rows ? output / kWordCodes : group,
                   column = is_by_rows ? group : output / kWordCodes;
    const uint32_t nibble =
        layout.packing == Packing::kAwq ? kAwqNibble[output % kWordCodes] : output % kWordCodes;
    const uint32_t word = word_at(layout.zeros + row * layout.zeros_stride + size_t{4} * column);
    zero = (word >> (4 * nibble) & 15u) + layout.zero_bias;
  }
  return (std::bit_cast<uint32_t>(scale) & ~31u) | zero;
}

// Exchanges the bits of `mask` in `b` with those `shift` higher in `a`.
void exchange(Four& a, Four& b, uint32_t shift, uint32_t mask) {
  const Four moved = ((a >> shift) ^ b) & mask;
  b ^= moved;
  a ^= moved << shift;
}

// Transposes four squares of 8 x 8 nibbles, one in each lane: nibble p of words[i] and nibble i of
// words[p] change places.
void transpose_nibbles(Four* words) {
  for (uint32_t i = 0; i < 8; i += 2) exchange(words[i], words[i + 1], 4, 0x0f0f0f0fu);
  for (uint32_t i = 0; i < 8; i += 4) {
    exchange(words[i], words[i + 2], 8, 0x00ff00ffu);
    exchange(words[i + 1], words[i + 3], 8, 0x00ff00ffu);
  }
  for (uint32_t i = 0; i < 4; ++i) exchange(words[i], words[i + 4], 16, 0x0000ffffu);
}

// The rows that are being made, and which outputs they are.
struct Target {
  std::byte* rows;
  size_t row_bytes;
  uint32_t first, end;
  std::byte* codes(uint32_t output, uint32_t block) const {
    return rows + (output - first) * row_bytes + size_t{block} * kBlockBytes + 4;
  }
};

void put_awq(const MatrixView& matrix, const Target& to) {
  for (uint32_t octet = to.first / 8 * 8; octet < to.end; octet += 8) {
    const std::byte* column = matrix.data + size_t{octet} / 8 * 4;
    for (uint32_t block = 0; block < matrix.inputs / 32; ++block) {
      Four words[8];  // lane j: inputs 8 * j .. 8 * j + 7 of the block
      for (uint32_t i = 0; i < 8; ++i) {
        for (uint32_t j = 0; j < 4; ++j)
          words[i][j] = word_at(column + (32 * block + 8 * j + i) * matrix.output_stride);
      }
      transpose_nibbles(words);
      for (uint32_t o = std::max(octet, to.first); o < std::min(octet + 8, to.end); ++o)
        std::memcpy(to.codes(o, block), &words[kAwqNibble[o % 8]], sizeof(Four));
    }
  }
}

void put_gptq(const MatrixView& matrix, const Target& to) {
  for (uint32_t block = 0; block < matrix.inputs / 32; ++block) {
    for (uint32_t word = 0; word < 4; ++word) {
      const std::byte* row = matrix.data + (4 * block + word) * matrix.output_stride;
      for (uint32_t o = to.first; o < to.end; ++o)
        std::memcpy(to.codes(o, block) + size_t{4} * word, row + size_t{4} * o, 4);
    }
  }
}

void put_by_rows(const MatrixView& matrix, const Target& to) {
  for (uint32_t o = to.first; o < to.end; ++o) {
    const std::byte* row = matrix.data + o * matrix.output_stride;
    for (uint32_t block = 0; block < matrix.inputs / 32; ++block)
      std::memcpy(to.codes(o, block), row + size_t{16} * block, 16);
  }
}

void put_group_words(const MatrixView& matrix, const Target& to) {
  const uint32_t blocks = matrix.layout.scale_inputs / 32;  // that share a scale
  for (uint32_t group = 0; group * matrix.layout.scale_inputs < matrix.inputs; ++group) {
    for (uint32_t o = to.first; o < to.end; ++o) {
      const uint32_t word = group_word(matrix, o, group);
      for (uint32_t b = group * blocks; b < (group + 1) * blocks; ++b)
        std::memcpy(to.codes(o, b) - 4, &word, sizeof(word));
    }
  }
}

MatrixView plain_int4(const MatrixView& matrix, uint32_t first, uint32_t count,
                      std::vector<std::byte>& made) {
  const size_t num_bytes = row_bytes(matrix.format, matrix.inputs);
  if (made.size() < count * num_bytes) made.resize(count * num_bytes);
  const Target to{made.data(), num_bytes, first, first + count};
  if (matrix.layout.packing == Packing::kAwq)
    put_awq(matrix, to);
  else if (matrix.layout.packing == Packing::kGptq)
    put_gptq(matrix, to);
  else
    put_by_rows(matrix, to);
  put_group_words(matrix, to);
  return {.data = made.data(),
          .format = matrix.format,
          .outputs = count,
          .inputs = matrix.inputs,
          .output_stride = static_cast<int64_t>(num_bytes)};
}

MatrixView plain_fp8(const MatrixView& matrix, uint32_t first, uint32_t count,
                     std::vector<std::byte>& made) {
  const uint32_t columns = divide_up(matrix.inputs, kFp8BlockWidth);
  const size_t num_bytes = size_t{columns} * sizeof(float);
  if (made.size() < count * num_bytes) made.resize(count * num_bytes);
  for (uint32_t o = 0; o < count; ++o) {
    for (uint32_t column = 0; column < columns; ++column) {
      const float scale = scale_at(matrix, (first + o) / matrix.layout.scale_outputs,
                                   column * kFp8BlockWidth / matrix.layout.scale_inputs);
      std::memcpy(made.data() + o * num_bytes + column * sizeof(float), &scale, sizeof(scale));
    }
  }
  MatrixView plain = matrix;
  plain.data += first * matrix.output_stride;
  plain.outputs = count;
  plain.scales = made.data();
  plain.scales_stride = static_cast<int64_t>(num_bytes);
  plain.layout = {};
  plain.layout.scale_outputs = 1;
  return plain;
}

}  // namespace

uint32_t outputs_per_scale(const MatrixView& matrix) {
  if (!is_plain(matrix)) return 1;
  const uint32_t own = matrix.layout.scale_outputs;
  return own != 0 ? own : std::max(format_facts(matrix.format).scale_outputs, 1u);
}

MatrixView plain_rows(const MatrixView& matrix, uint32_t first, uint32_t count,
                      std::vector<std::byte>& made) {
  return matrix.format == WeightFormat::kInt4Zp ? plain_int4(matrix, first, count, made)
                                                : plain_fp8(matrix, first, count, made);
}

MatrixView plain_matrix(const MatrixView& matrix, std::vector<std::byte>& made) {
  return matrix.data == nullptr || is_plain(matrix) ? matrix
                                                    : plain_rows(matrix, 0, matrix.outputs, made);
}

}  // namespace dflash::compute
