// A linear layer on the CPU (operators/linear.h): matrices with equal inputs, packed one behind
// another into the panels of their class, and the product of any number of rows with all of them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "compute/cpu/instruction_sets.h"
#include "compute/cpu/kernel_set.h"
#include "compute/cpu/page_buffer.h"
#include "compute/cpu/scratch_pool.h"
#include "compute/cpu/thread_pool.h"
#include "compute/operators/linear.h"
#include "compute/yielding_progress.h"

namespace dflash::compute {

class PackedLinear;

// What one of several layers that read the same rows writes; see PackedLinear::run.
struct LinearProduct {
  const PackedLinear* linear;
  RowsTarget out;                      // [num_rows, outputs()]
  const RowsView* residual = nullptr;  // [num_rows, outputs()]
};

// Never changes once it is made, so that any thread may use it.
class PackedLinear {
 public:
  // Packs the parts, whose memory is not used afterwards. A part whose format the class does not
  // take gets f32-canonical (part_numerics). Errors: those of check_parts; kUnsupported where `isa`
  // does not compute the class; kCheckpoint for damaged weights; kOutOfMemory.
  static Result<PackedLinear> create(std::span<const LinearPart> parts, NumericsClass numerics,
                                     Isa isa, PageArena& arena, YieldingProgress& progress);

  uint32_t inputs() const { return inputs_; }        // of each part
  uint32_t row_width() const { return row_width_; }  // elements of a row that are read
  uint32_t outputs() const { return outputs_; }      // of all parts together
  size_t num_parts() const { return parts_.size(); }
  WeightFormat format(size_t part) const { return parts_[part].format; }
  NumericsClass numerics(size_t part) const { return parts_[part].kernels->numerics; }
  uint64_t resident_bytes() const;

  // Multiplies rows [num_rows, row_width()] and writes out [num_rows, outputs()]. `residual`, where
  // there is one, is [num_rows, outputs()] and may be the memory of `out`; otherwise nothing may
  // overlap with `out`. Errors: kInvalidArgument; kOutOfMemory; kRange "row R, column C: ..." for
  // the first value that is finite but infinite in the dtype of `out`, all of which is written.
  Status run(ThreadPool& pool, ScratchBlock& scratch, const RowsView& rows, const RowsTarget& out,
             const RowsView* residual = nullptr) const;
  // Does this for several layers that read the same rows, in one job of the pool: a job costs its
  // threads a meeting, which counts where a product takes tens of microseconds. The bits are those
  // of run(). Errors: those of the first layer that fails, all of which is written.
  static Status run_together(ThreadPool& pool, ScratchBlock& scratch, const RowsView& rows,
                             std::span<const LinearProduct> products);

  // What tasks read first in a call for so many rows that is this layer's alone, or begins with it
  // and reads `all_bytes` of weights.
  FirstReads first_reads(uint32_t num_rows, uint32_t num_threads, size_t all_bytes) const;

  // Writes the weights of outputs `ids`, one of them per row of `out` [ids.size(), inputs()]:
  // widened exactly by their format's formula, then rounded once to the dtype of `out`. This reads
  // an embedding out of the one packed store. Errors: kInvalidArgument naming an id that does not
  // exist; kRange as in run().
  Status gather(ThreadPool& pool, std::span<const int64_t> ids, const RowsTarget& out) const;

 private:
  struct Part {
    const KernelSet* kernels;
    WeightFormat format;
    uint32_t outputs;
    uint32_t first_output;  // among those of all parts
    uint32_t num_panels;
    size_t panel_bytes;
    size_t first_byte;        // of its panels, in panels_
    bool is_encoded;          // whether its kernels read encoded rows, or widened ones
    size_t input_at;          // bytes from the start of such a row to the part's inputs
    std::vector<float> bias;  // [num_panels * panel_width], padded with zeros; empty if none
  };
  // Inputs that some parts read encoded; each column is encoded once for all of them.
  struct Encoding {
    const KernelSet* kernels;
    uint32_t input_column;
    size_t at;  // bytes from the start of an encoded row
  };
  struct Call;

  PackedLinear() = default;
  static uint32_t panels_per_group(const Part& part, uint32_t num_rows, size_t wanted_bytes);
  static void run_tasks(ThreadPool& pool, std::span<const Call> calls);
  // Adds a part whose panels begin at `first_byte`; returns where the next part's may begin.
  size_t place(const LinearPart& source, const KernelSet& kernels, size_t first_byte);
  // Returns where an encoded row has these inputs, for which it makes room if it has none yet.
  size_t encoding_at(const KernelSet& kernels, uint32_t input_column);
  Status pack(std::span<const LinearPart> sources, YieldingProgress& progress);
  // Reads one output's weights [inputs_] back.
  void unpack(uint32_t output, float* values) const;

  uint32_t inputs_ = 0;
  uint32_t row_width_ = 0;
  uint32_t outputs_ = 0;
  size_t encoded_bytes_ = 0;  // of one row, all encodings together
  std::vector<Part> parts_;
  std::vector<Encoding> encodings_;
  PageBuffer panels_;
};

}  // namespace dflash::compute
