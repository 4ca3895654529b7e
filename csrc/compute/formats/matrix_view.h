// Where a tensor lies in a mapped checkpoint, and in which format. Views own nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/result.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute {

// A mapped file that can also be read. Pages that are wanted once are cheaper to copy than to fault
// in, and a file that has become shorter is then an error instead of SIGBUS.
class MappedBytes {
 public:
  virtual ~MappedBytes() = default;
  // Copies [from, from + num_bytes) of the mapping to `to`; any thread. Errors: kCheckpoint naming
  // the file.
  virtual Status copy(const std::byte* from, size_t num_bytes, std::byte* to) const = 0;
};

// How a checkpoint keeps a matrix. What is not plain is made so a few rows at a time
// (plain_rows.h).
enum class Packing : uint8_t {
  kNone,  // as MatrixView says
  // FP8 with scales of another shape or dtype: one per scale_outputs x scale_inputs.
  kFp8Scales,
  // Four-bit integers in words, the lowest bits first. Rows of words are `output_stride` bytes
  // apart, rows of scales `scales_stride`.
  kPackQuantized,  // compressed-tensors: rows are outputs, and a word has eight inputs
  kGptq,           // a row is eight inputs, and a word is one output; rows of scales are groups
  kAwq,            // a row is one input, and a word has eight outputs; rows of scales are groups
};
// What a checkpoint has otherwise than the format says; all zeros for most.
struct CheckpointLayout {
  Packing packing = Packing::kNone;
  Dtype scale_dtype = Dtype::kF32;
  uint8_t zero_bias = 0;  // added to a stored zero point: GPTQ's first version stores zero - 1
  // Outputs and inputs that share a scale. In plain FP8 scale_outputs is 1 where every output has a
  // row of its own, and otherwise 0.
  uint32_t scale_outputs = 0, scale_inputs = 0;
  // Zero points, those of eight neighbouring outputs in a 32-bit word: [group, output / 8], but in
  // compressed-tensors [output / 8, group]. Null: all are 8.
  const std::byte* zeros = nullptr;
  int64_t zeros_stride = 0;  // in bytes
};

// A weight matrix as it lies in a mapped checkpoint, not owned.
//
// In float formats, element (output o, input i) lies at data + o * output_stride + i *
// input_stride, counted in elements; strides make packed, transposed and interleaved layouts the
// same thing.
//
// In all other formats, the blocks of output o lie together with ascending inputs from
// data + o * output_stride on, counted in BYTES, and input_stride is 0. Scales that lie apart are
// in rows of ascending inputs, `scales_stride` bytes apart: a row per output (mxfp4) or per 128
// outputs (fp8), where the first row belongs to this view's first output.
struct MatrixView {
  const std::byte* data = nullptr;  // null where there is no such matrix
  WeightFormat format = WeightFormat::kF32;
  uint32_t outputs = 0;
  uint32_t inputs = 0;
  int64_t output_stride = 0;
  int64_t input_stride = 0;
  const std::byte* scales = nullptr;  // null where the format has none that lie apart
  int64_t scales_stride = 0;
  const MappedBytes* file = nullptr;  // the file in which `data` lies; null for plain memory
  CheckpointLayout layout{};
};
// A bias as it lies in a mapped checkpoint, not owned; the stride counts elements.
struct VectorView {
  const std::byte* data = nullptr;  // null where there is no such bias
  Dtype dtype = Dtype::kF32;
  uint32_t count = 0;
  int64_t stride = 1;
};

}  // namespace dflash::compute
