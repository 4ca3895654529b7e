// The compute contract: the experts of one shard, resident in one backend, and the ragged forward
// over them. The CPU backend, the reference and cards implement it; each produces the bits of the
// layer's numerics class, or stays within its bounds (numerics.h, docs/numerics.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
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

// The tensors of one expert where they lie in the checkpoint; nothing is owned.
struct ExpertWeights {
  MatrixView gate, up, down;                 // gate [I, in], up [I, in], down [out, I]
  VectorView gate_bias, up_bias, down_bias;  // [I], [I], [out]
};

// One ragged batch. A pair is one (row, expert) of the routing; the pairs of row r are the
// row_counts[r] entries behind those of the rows before it.
struct ForwardArgs {
  // [num_rows, in_size] in row_dtype. The peer may be able to write this memory, so each element is
  // read only once.
  const std::byte* rows = nullptr;
  Dtype row_dtype = Dtype::kF32;
  uint32_t num_rows = 0;
  std::span<const uint16_t> row_counts;  // [num_rows]
  // [num_pairs], each less than num_local_experts; the caller has validated them.
  std::span<const uint16_t> local_expert_ids;
  std::span<const float> weights;  // [num_pairs]
  std::byte* reply = nullptr;      // [num_rows, out_size] in reply_dtype, written once
  Dtype reply_dtype = Dtype::kF32;
};

// A layer that keeps its experts until it is destroyed.
class ExpertLayer {
 public:
  virtual ~ExpertLayer() = default;
  virtual const FfnSpec& spec() const = 0;
  virtual uint32_t num_local_experts() const = 0;
  // Bytes of anonymous memory that hold weights; files that are only mapped do not count.
  virtual uint64_t resident_bytes() const = 0;
  // Packs one expert's weights and counts its progress. Different experts may be loaded from
  // different threads. Errors: kInvalidArgument where tensors do not match the spec, kUnsupported
  // where the resident format cannot hold them, kCheckpoint for damaged values.
  virtual Status load_expert(uint32_t local_expert_id, const ExpertWeights& weights,
                             YieldingProgress& progress) = 0;
  // The checksum of a loaded expert's source bytes (experts/content_checksum.h), taken while they
  // were packed. Empty for an expert that is not loaded, and where the layer has not summed up the
  // bytes: weights that stay in the mapped checkpoint are read by a ContentReader instead.
  virtual std::optional<uint64_t> content_checksum(uint32_t local_expert_id) const = 0;
  // Computes the batch and counts its progress; one call at a time per layer. Errors: kRange "row
  // R, column C: value ... exceeds the range of f16" for the first such value in row order,
  // kInvalidArgument for an expert that was not loaded.
  virtual Status forward(const ForwardArgs& args, YieldingProgress& progress) = 0;
  // Nanoseconds that a device of its own has computed in all forwards so far, without copies; 0
  // where the caller's threads compute.
  virtual int64_t device_ns() const { return 0; }
  // The memory of this process in which a loaded expert's weights lie, for whoever sums it up again
  // later: panels and biases, each a multiple of 32 bytes. Empty where they lie elsewhere, on a
  // card or in the mapped checkpoint.
  virtual std::array<std::span<const std::byte>, 3> resident_pieces(
      uint32_t /*local_expert_id*/) const {
    return {};
  }
};

}  // namespace dflash::compute
