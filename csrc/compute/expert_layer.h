// The compute contract: the experts of one shard, resident in one backend, and the ragged forward
// over them. `reference` and `cpu` implement it; both produce the bits of the layer's numerics
// class (numerics.h, docs/architecture.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/dtype.h"
#include "base/result.h"
#include "compute/ffn_spec.h"
#include "compute/progress.h"
#include "compute/weight_format.h"

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
struct ExpertWeights {
  MatrixView gate, up, down;                 // gate [I, in], up [I, in], down [out, I]
  VectorView gate_bias, up_bias, down_bias;  // [I], [I], [out]
};

// One ragged batch. Pairs of row r are the row_counts[r] entries after those of rows before it.
struct ForwardArgs {
  // [num_rows, in_size] in row_dtype; may be peer-writable memory: each element is read once
  const std::byte* rows = nullptr;
  Dtype row_dtype = Dtype::kF32;
  uint32_t num_rows = 0;
  std::span<const uint16_t> row_counts;  // [num_rows]
  // [num_pairs] each < num_local_experts (validated by the caller)
  std::span<const uint16_t> local_expert_ids;
  std::span<const float> weights;  // [num_pairs]
  std::byte* reply = nullptr;      // [num_rows, out_size] in reply_dtype, written once
  Dtype reply_dtype = Dtype::kF32;
};

class ExpertLayer {
 public:
  virtual ~ExpertLayer() = default;
  virtual const FfnSpec& spec() const = 0;
  virtual uint32_t num_local_experts() const = 0;
  // Bytes of anonymous memory held for weights.
  virtual uint64_t resident_bytes() const = 0;
  // Packs one expert's weights. Shapes must match the spec. Different experts may load from
  // different threads.
  virtual Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                             ProgressCounter& progress) = 0;
  // What the source bytes of a loaded expert add up to (experts/content_checksum.h), taken while
  // they were packed. Nothing where the layer has not read them all (weights that stay in the
  // mapped checkpoint: a ContentReader reads those), or for an expert that is not loaded.
  virtual std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const = 0;
  // Computes the batch. One call at a time per layer. Errors: kRange "row R, column C: value ...
  // exceeds f16" (first in row order), kInvalidArgument on an expert that was not loaded.
  virtual Status forward(const ForwardArgs& args, ProgressCounter& progress) = 0;
  // Time that a device of its own computed in all forwards so far, copies aside; 0 where the
  // caller's threads compute.
  virtual int64_t device_ns() const { return 0; }
};

}  // namespace dflash::compute
