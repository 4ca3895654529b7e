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
#include "compute/formats/weight_format.h"
#include "compute/yielding_progress.h"

namespace dflash::compute {

// The tensors of one expert where they lie in the checkpoint; nothing is owned.
struct ExpertWeights {
  MatrixView gate, up, down;                 // gate [I, in], up [I, in], down [out, I]
  VectorView gate_bias, up_bias, down_bias;  // [I], [I], [out]
};

// What of an expert is needed first, and what later.
enum class ExpertPart : uint8_t { kGateUp, kDown };

// The experts of a call that are still on their way from a disk. Any thread.
class ExpertArrivals {
 public:
  virtual ~ExpertArrivals() = default;
  virtual bool has_come(uint32_t local_expert_id, ExpertPart part) const = 0;
  // Waits until the part has come, counting the progress of the disk. Errors: kCheckpoint where it
  // does not come.
  virtual Status await(uint32_t local_expert_id, ExpertPart part) = 0;
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
  // Where not all experts are in memory yet; a layer without map_expert() never gets one.
  ExpertArrivals* arrivals = nullptr;
};

// Names the bytes of packed panels in all layouts. Files of panels outlive the program that wrote
// them: whoever changes a byte of any layout raises this number, and a test pins the bytes.
inline constexpr uint32_t kPanelsVersion = 1;

// How a layer lays an expert into memory, and so into a file of panels. Where all of this and
// kPanelsVersion are equal, so are the bytes of equal weights.
struct PanelForm {
  uint32_t panel_width = 0;     // outputs of a panel
  bool has_bf16_pairs = false;  // pack_bf16_pairs has laid them (cpu/panels/pack.h)
  ResidentFormats formats;
  uint64_t panel_bytes = 0;    // of one expert, a multiple of 64
  uint64_t bias_bytes = 0;     // of its biases behind them, in float32: gate and up, then down
  uint64_t gate_up_bytes = 0;  // of the panels of gate and up, which come first

  uint64_t num_bytes() const { return panel_bytes + bias_bytes; }
  bool operator==(const PanelForm&) const = default;
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
  // How the layer lays experts into memory; empty where other programs cannot use what it lays: on
  // a card, in the reference, and where weights stay in the checkpoint.
  virtual std::optional<PanelForm> panel_form() const { return std::nullopt; }
  // Takes `panels`, num_bytes() of panel_form() at an address that is a multiple of 64, in place of
  // what load_expert() would pack; memory that the expert had is given back. The caller has them
  // from where equal weights were packed, keeps them as long as the layer lives, and says what
  // content_checksum() is to answer. As with load_expert(), nobody may use the expert meanwhile.
  // Errors: kUnsupported, kInvalidArgument.
  virtual Status map_expert(uint32_t /*local_expert_id*/, std::span<const std::byte> /*panels*/,
                            uint64_t /*content_checksum*/) {
    return Error{ErrorCode::kUnsupported, "this layer takes no panels from a file"};
  }
  // Nanoseconds that a device of its own has computed in all forwards so far, without copies; 0
  // where the caller's threads compute.
  virtual int64_t device_ns() const { return 0; }
  // The memory of this process in which a loaded expert's weights lie, for whoever sums it up again
  // later or writes it to a file: panels, biases of gate and up, biases of down, each a multiple of
  // 32 bytes. Empty where they lie elsewhere, on a card or in the mapped checkpoint.
  virtual std::array<std::span<const std::byte>, 3> resident_pieces(
      uint32_t /*local_expert_id*/) const {
    return {};
  }
};

}  // namespace dflash::compute
