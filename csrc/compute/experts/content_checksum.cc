// The checksums of an expert and of a shard, and the reader that takes them without packing.
// SPDX-License-Identifier: Apache-2.0
#include "compute/experts/content_checksum.h"

#include <algorithm>

#include "compute/formats/plain_rows.h"

namespace dflash::compute {
namespace {

// Bytes of one output with its share of scales that lie apart. Steps of the reader are sized by it.
size_t output_bytes(const MatrixView& matrix) {
  const FormatFacts& facts = format_facts(matrix.format);
  const size_t values = row_bytes(matrix.format, matrix.inputs);
  if (facts.scale_bytes == 0) return values;
  return values + matrix.inputs / facts.scale_inputs * facts.scale_bytes / facts.scale_outputs;
}

}  // namespace

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
