// Packs the parts of a linear layer and reads single outputs back. The product with rows is in
// packed_linear_run.cc.
// SPDX-License-Identifier: Apache-2.0
#include "compute/cpu/packed_linear.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/dtype.h"
#include "base/float_mode.h"
#include "base/operator_clock.h"
#include "compute/cpu/panels/matrix_packer.h"
#include "compute/cpu/panels/pack.h"
#include "compute/experts/layer_checks.h"
#include "compute/formats/dequantize.h"
#include "compute/formats/value_checks.h"

namespace dflash::compute {
namespace {

constexpr uint32_t kGatherRows = 4;  // outputs that one task reads back

size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace

Result<PackedLinear> PackedLinear::create(std::span<const LinearPart> parts, NumericsClass numerics,
                                          Isa isa, PageArena& arena, YieldingProgress& progress) {
  DFLASH_TRY(check_parts(parts));
  if (kernel_set(isa, numerics) == nullptr) {
    return Error{ErrorCode::kUnsupported, std::string("CPU kernel set '") + isa_name(isa) +
                                              "' does not compute numerics class " +
                                              numerics_name(numerics)};
  }
  PackedLinear linear;
  linear.inputs_ = parts[0].matrix.inputs;
  size_t num_bytes = 0;
  for (const LinearPart& part : parts) DFLASH_TRY(check_panels("a part", part.format()));
  for (const LinearPart& part : parts)
    num_bytes =
        linear.place(part, *kernel_set(isa, part_numerics(numerics, part.format())), num_bytes);
  auto panels = arena.take(num_bytes);
  if (!panels.ok()) return std::move(panels).error();
  linear.panels_ = std::move(panels).value();
  DFLASH_TRY(linear.pack(parts, progress));
  return linear;
}

size_t PackedLinear::place(const LinearPart& source, const KernelSet& kernels, size_t first_byte) {
  const uint32_t width = kernels.panel_width, outputs = source.matrix.outputs;
  Part part{};
  part.kernels = &kernels;
  part.format = source.format();
  part.outputs = outputs;
  part.first_output = outputs_;
  part.num_panels = outputs / width + (outputs % width != 0 ? 1 : 0);
  part.panel_bytes = panel_bytes(part.format, inputs_, width);
  part.first_byte = first_byte;
  part.bias = widen_vector(source.bias, part.num_panels * width);
  part.is_encoded = kernels.encode != nullptr;
  part.input_at = part.is_encoded ? encoding_at(kernels, source.input_column)
                                  : sizeof(float) * source.input_column;
  outputs_ += outputs;
  row_width_ = std::max(row_width_, source.input_column + inputs_);
  // The next part also starts on a cache line.
  const size_t end = whole_lines(first_byte + part.panel_bytes * part.num_panels);
  parts_.push_back(std::move(part));
  return end;
}

size_t PackedLinear::encoding_at(const KernelSet& kernels, uint32_t input_column) {
  for (const Encoding& encoding : encodings_) {
    if (encoding.kernels == &kernels && encoding.input_column == input_column) return encoding.at;
  }
  encodings_.push_back({&kernels, input_column, encoded_bytes_});
  encoded_bytes_ += whole_lines(kernels.encoded_bytes(inputs_));
  return encodings_.back().at;
}

Status PackedLinear::pack(std::span<const LinearPart> sources, YieldingProgress& progress) {
  const CanonicalFloatMode mode;  // because quantising rounds
  std::vector<std::byte> read;
  for (size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const std::string name = "part " + std::to_string(p);
    const PanelTarget target{part.format, panels_.data() + part.first_byte, part.panel_bytes};
    MatrixChecksum sum;
    DFLASH_TRY(MatrixPacker(*part.kernels)
                   .pack(name.c_str(), sources[p].matrix, target, read, sum, progress));
  }
  return ok();
}

uint64_t PackedLinear::resident_bytes() const {
  uint64_t bytes = panels_.num_bytes();
  for (const Part& part : parts_) bytes += sizeof(float) * part.bias.size();
  return bytes;
}

void PackedLinear::unpack(uint32_t output, float* values) const {
  const auto part = std::prev(
      std::upper_bound(parts_.begin(), parts_.end(), output,
                       [](uint32_t wanted, const Part& p) { return wanted < p.first_output; }));
  const uint32_t width = part->kernels->panel_width, local = output - part->first_output;
  const PackedOutput packed{panels_.data() + part->first_byte + local / width * part->panel_bytes,
                            part->format, width, local % width, inputs_};
  (part->kernels->unpack == nullptr ? unpack_output : part->kernels->unpack)(packed, values);
}

Status PackedLinear::gather(ThreadPool& pool, std::span<const int64_t> ids,
                            const RowsTarget& out) const {
  if (!ids.empty() && out.data == nullptr)
    return Error{ErrorCode::kInvalidArgument, "weights are gathered without memory for them"};
  for (int64_t id : ids) {
    if (id < 0 || id >= int64_t{outputs_}) {
      return Error{ErrorCode::kInvalidArgument, "row " + std::to_string(id) + " of a matrix with " +
                                                    std::to_string(outputs_) + " rows"};
    }
  }
  OperatorScope scope(Operator::kEmbedding);
  scope.count(ids.size() * (resident_bytes() / outputs_), 0, "");
  FirstOverflow overflow;
  pool.run((ids.size() + kGatherRows - 1) / kGatherRows, [&](uint64_t task) {
    const CanonicalFloatMode mode;
    std::vector<float> values(inputs_);
    for (size_t row = task * kGatherRows; row < std::min(ids.size(), (task + 1) * kGatherRows);
         ++row) {
      unpack(static_cast<uint32_t>(ids[row]), values.data());
      if (!convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), out.dtype,
                   out.data + row * out.stride_bytes, values.size()))
        overflow.keep(static_cast<uint32_t>(row), 0, values, out.dtype);
    }
  });
  return overflow.take();
}

}  // namespace dflash::compute
