// Turns tuples into views of weights.
// SPDX-License-Identifier: Apache-2.0
#include "bindings/weight_sources.h"

#include <string>

#include "bindings/arguments.h"
#include "store/mapped_file.h"

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

bool lies_in_memory(const py::object& source) {
  return !source.is_none() && py::isinstance<py::int_>(py::cast<py::tuple>(source)[0]);
}

}  // namespace

compute::MatrixView matrix_source(const py::object& source) {
  if (source.is_none()) return {};
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 7 && parts.size() != 10)
    raise(Error{ErrorCode::kInvalidArgument, "a matrix source has 7 or 10 parts"});
  const auto& file = py::cast<const MappedFile&>(parts[0]);
  const compute::WeightFormat format =
      unwrap(compute::parse_weight_format(py::cast<std::string>(parts[2])));
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
