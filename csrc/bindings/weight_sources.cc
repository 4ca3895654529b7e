// Turns tuples into views of weights.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/weight_sources.h"

#include <algorithm>
#include <string>
#include <utility>

#include "bindings/arguments.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using store::MappedFile;

// An address of 0 would be no matrix at all.
const std::byte* address(const py::handle& value) {
  const auto found = py::cast<uintptr_t>(value);
  if (found == 0) raise(Error{ErrorCode::kInvalidArgument, "weights cannot lie at address 0"});
  return reinterpret_cast<const std::byte*>(found);
}

compute::Packing parse_packing(const std::string& name) {
  using compute::Packing;
  if (name == "fp8_scales") return Packing::kFp8Scales;
  if (name == "pack_quantized") return Packing::kPackQuantized;
  if (name == "gptq") return Packing::kGptq;
  if (name == "awq") return Packing::kAwq;
  raise(Error{ErrorCode::kInvalidArgument, "packing '" + name + "' is not known"});
}

// Returns the first of `num_rows` rows that lie in the file (file, byte offset, row stride).
const std::byte* rows_at(const py::tuple& place, uint64_t num_rows, uint64_t row_bytes) {
  const auto stride = py::cast<uint64_t>(place[2]);
  if (num_rows == 0 || num_rows > UINT32_MAX || row_bytes > UINT32_MAX || stride > UINT32_MAX)
    raise(Error{ErrorCode::kInvalidArgument, "rows of a matrix are out of range"});
  return unwrap(py::cast<const MappedFile&>(place[0]).bytes(py::cast<uint64_t>(place[1]),
                                                            (num_rows - 1) * stride + row_bytes))
      .data();
}

// The rows of words, scales and zero points of a packing: how many, and bytes of one.
struct PackedSizes {
  uint64_t word_rows, word_bytes, scale_rows, scale_bytes, zero_rows, zero_bytes;
};

PackedSizes packed_sizes(const compute::MatrixView& matrix) {
  const compute::CheckpointLayout& layout = matrix.layout;
  const uint64_t outputs = matrix.outputs, inputs = matrix.inputs;
  const uint64_t groups = (inputs + layout.scale_inputs - 1) / layout.scale_inputs;
  const uint64_t element = dtype_bytes(layout.scale_dtype), octets = (outputs + 7) / 8;
  switch (layout.packing) {
    case compute::Packing::kFp8Scales: {
      const uint64_t rows = (outputs + layout.scale_outputs - 1) / layout.scale_outputs;
      return {outputs, inputs, rows, groups * element, 0, 0};
    }
    case compute::Packing::kPackQuantized:
      return {outputs, inputs / 2, outputs, groups * element, octets, groups * 4};
    case compute::Packing::kGptq:
      return {inputs / 8, outputs * 4, groups, outputs * element, groups, octets * 4};
    default: return {inputs, octets * 4, groups, outputs * element, groups, octets * 4};
  }
}

// Reads the matrix of a source of eleven parts.
compute::MatrixView packed_source(const py::tuple& parts, compute::WeightFormat format) {
  const auto layout = py::cast<py::tuple>(parts[10]);
  if (layout.size() != 6)
    raise(Error{ErrorCode::kInvalidArgument, "the layout of a matrix has 6 parts"});
  compute::MatrixView matrix{.format = format,
                             .outputs = py::cast<uint32_t>(parts[3]),
                             .inputs = py::cast<uint32_t>(parts[4]),
                             .output_stride = py::cast<int64_t>(parts[5]),
                             .scales_stride = py::cast<int64_t>(parts[9]),
                             .file = &py::cast<const MappedFile&>(parts[0])};
  matrix.layout = {.packing = parse_packing(py::cast<std::string>(layout[0])),
                   .scale_dtype = parse_dtype(py::cast<std::string>(layout[1])),
                   .zero_bias = py::cast<uint8_t>(layout[5]),
                   .scale_outputs = py::cast<uint32_t>(layout[2]),
                   .scale_inputs = py::cast<uint32_t>(layout[3])};
  const bool is_fp8 = matrix.layout.packing == compute::Packing::kFp8Scales;
  const uint32_t unit = is_fp8 ? compute::kFp8BlockWidth : compute::kGroupInputs;
  const uint32_t group = matrix.layout.scale_inputs;
  const auto wanted = is_fp8 ? compute::WeightFormat::kFp8E4m3B128 : compute::WeightFormat::kInt4Zp;
  const bool is_whole = group != 0 && group % unit == 0 && matrix.inputs % group == 0;
  if (format != wanted || matrix.layout.scale_outputs == 0 || matrix.layout.zero_bias > 1 ||
      group == 0 || !(is_whole || (is_fp8 && (group % unit == 0 || group >= matrix.inputs))))
    raise(Error{ErrorCode::kInvalidArgument, "the layout of a matrix does not fit its format"});
  const PackedSizes sizes = packed_sizes(matrix);
  matrix.data =
      rows_at(py::make_tuple(parts[0], parts[1], parts[5]), sizes.word_rows, sizes.word_bytes);
  matrix.scales =
      rows_at(py::make_tuple(parts[7], parts[8], parts[9]), sizes.scale_rows, sizes.scale_bytes);
  if (!layout[4].is_none()) {
    const auto zeros = py::cast<py::tuple>(layout[4]);
    matrix.layout.zeros = rows_at(zeros, sizes.zero_rows, sizes.zero_bytes);
    matrix.layout.zeros_stride = py::cast<int64_t>(zeros[2]);
  }
  return matrix;
}

bool lies_in_memory(const py::object& source) {
  return !source.is_none() && py::isinstance<py::int_>(py::cast<py::tuple>(source)[0]);
}

}  // namespace

compute::MatrixView matrix_source(const py::object& source) {
  if (source.is_none()) return {};
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 7 && parts.size() != 10 && parts.size() != 11)
    raise(Error{ErrorCode::kInvalidArgument, "a matrix source has 7, 10 or 11 parts"});
  const auto& file = py::cast<const MappedFile&>(parts[0]);
  const compute::WeightFormat format =
      unwrap(compute::parse_weight_format(py::cast<std::string>(parts[2])));
  if (parts.size() == 11) return packed_source(parts, format);
  const auto offset = py::cast<uint64_t>(parts[1]);
  const auto outputs = py::cast<uint32_t>(parts[3]), inputs = py::cast<uint32_t>(parts[4]);
  const auto output_stride = py::cast<int64_t>(parts[5]);
  if (compute::is_float(format)) {
    return unwrap(file.matrix(offset, compute::dtype_of(format), outputs, inputs, output_stride,
                              py::cast<int64_t>(parts[6])));
  }
  compute::MatrixView matrix = unwrap(file.blocks(offset, format, outputs, inputs, output_stride));
  if (parts.size() == 10) {
    const auto& scales_file = py::cast<const MappedFile&>(parts[7]);
    unwrap(
        scales_file.add_scales(py::cast<uint64_t>(parts[8]), py::cast<int64_t>(parts[9]), matrix));
  }
  return matrix;
}

compute::VectorView vector_source(const py::object& source) {
  if (source.is_none()) return {};
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 5) raise(Error{ErrorCode::kInvalidArgument, "a vector source has 5 parts"});
  const auto& file = py::cast<const MappedFile&>(parts[0]);
  return unwrap(file.vector(py::cast<uint64_t>(parts[1]),
                            parse_dtype(py::cast<std::string>(parts[2])),
                            py::cast<uint32_t>(parts[3]), py::cast<int64_t>(parts[4])));
}

std::vector<std::shared_ptr<MappedFile>> files_of(std::initializer_list<py::object> sources) {
  std::vector<std::shared_ptr<MappedFile>> files;
  const auto take = [&files](const py::handle& file) {
    auto found = py::cast<std::shared_ptr<MappedFile>>(file);
    if (std::find(files.begin(), files.end(), found) == files.end())
      files.push_back(std::move(found));
  };
  for (const py::object& source : sources) {
    if (source.is_none()) continue;
    const auto parts = py::cast<py::tuple>(source);
    take(parts[0]);
    if (parts.size() >= 10) take(parts[7]);
    if (parts.size() < 11) continue;
    const py::object zeros = py::cast<py::tuple>(parts[10])[4];
    if (!zeros.is_none()) take(py::cast<py::tuple>(zeros)[0]);
  }
  return files;
}

compute::MatrixView file_or_memory_matrix(const py::object& source) {
  if (!lies_in_memory(source)) return matrix_source(source);
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 6 && parts.size() != 8)
    raise(Error{ErrorCode::kInvalidArgument, "a matrix in memory has 6 or 8 parts"});
  compute::MatrixView matrix;
  matrix.data = address(parts[0]);
  matrix.format = unwrap(compute::parse_weight_format(py::cast<std::string>(parts[1])));
  matrix.outputs = py::cast<uint32_t>(parts[2]);
  matrix.inputs = py::cast<uint32_t>(parts[3]);
  matrix.output_stride = py::cast<int64_t>(parts[4]);
  matrix.input_stride = py::cast<int64_t>(parts[5]);
  if (parts.size() == 8) {
    matrix.scales = address(parts[6]);
    matrix.scales_stride = py::cast<int64_t>(parts[7]);
  }
  return matrix;
}

compute::VectorView file_or_memory_vector(const py::object& source) {
  if (!lies_in_memory(source)) return vector_source(source);
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 4)
    raise(Error{ErrorCode::kInvalidArgument, "a vector in memory has 4 parts"});
  return {address(parts[0]), parse_dtype(py::cast<std::string>(parts[1])),
          py::cast<uint32_t>(parts[2]), py::cast<int64_t>(parts[3])};
}

}  // namespace dflash::bindings
