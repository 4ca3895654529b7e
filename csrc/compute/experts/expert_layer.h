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
#include "compute/experts/ffn_spec.h"
#include "compute/formats/matrix_view.h"
#include "compute/yielding_progress.h"

namespace dflash::compute {

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
                             YieldingProgress& progress) = 0;
  // What the source bytes of a loaded expert add up to (experts/content_checksum.h), taken while
  // they were packed. Nothing where the layer has not read them all (weights that stay in the
  // mapped checkpoint: a ContentReader reads those), or for an expert that is not loaded.
  virtual std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const = 0;
  // Computes the batch. One call at a time per layer. Errors: kRange "row R, column C: value ...
  // exceeds f16" (first in row order), kInvalidArgument on an expert that was not loaded.
  virtual Status forward(const ForwardArgs& args, YieldingProgress& progress) = 0;
  // Time that a device of its own computed in all forwards so far, copies aside; 0 where the
  // caller's threads compute.
  virtual int64_t device_ns() const { return 0; }
};

}  // namespace dflash::compute
