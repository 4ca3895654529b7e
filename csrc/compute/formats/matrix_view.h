// Where a tensor lies in a mapped checkpoint, and in which format. Views own nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/result.h"
#include "compute/formats/weight_format.h"

namespace dflash::compute {

// A mapped file that can also be read. Pages wanted once are cheaper to copy than to fault in, and
// a file that has become shorter is an error then instead of SIGBUS.
class MappedBytes {
 public:
  virtual ~MappedBytes() = default;
  // Copies [from, from + num_bytes) of the mapping to `to`. Any thread. Errors: kCheckpoint naming
  // the file.
  virtual Status copy(const std::byte* from, size_t num_bytes, std::byte* to) const = 0;
};

// A weight matrix as it lies in a mapped checkpoint. Not owned.
// Float formats: element (output o, input i) is at data + (o*output_stride + i*input_stride)
// elements; strides make packed, transposed and interleaved layouts the same thing. All other
// formats: the blocks of output o lie together, ascending inputs, from data + o*output_stride BYTES
// on (input_stride is 0); scales lying apart are in rows of ascending inputs, `scales_stride` bytes
// from one row to the next: a row per output (mxfp4) or per 128 outputs, beginning with this view's
// first (fp8).
struct MatrixView {
  const std::byte* data = nullptr;  // null: absent
  WeightFormat format = WeightFormat::kF32;
  uint32_t outputs = 0;
  uint32_t inputs = 0;
  int64_t output_stride = 0;
  int64_t input_stride = 0;
  const std::byte* scales = nullptr;  // null: the format has none apart
  int64_t scales_stride = 0;
  const MappedBytes* file = nullptr;  // what `data` lies in; null: memory
};
struct VectorView {
  const std::byte* data = nullptr;  // null: absent
  Dtype dtype = Dtype::kF32;
  uint32_t count = 0;
  int64_t stride = 1;
};

}  // namespace dflash::compute
