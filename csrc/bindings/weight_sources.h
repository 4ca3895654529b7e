// Where Python says that weights lie: in a mapped checkpoint, or in memory that somebody else owns,
// such as a torch tensor's. The views own nothing. The caller holds the GIL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <initializer_list>
#include <memory>
#include <vector>

#include "bindings/typed.h"
#include "compute/formats/matrix_view.h"
#include "store/mapped_file.h"

namespace dflash::bindings {

// How a signature names what matrix_source() and vector_source() read; they check it.
using MatrixFields =
    pybind11::typing::Tuple<store::MappedFile, pybind11::int_, pybind11::str, pybind11::int_,
                            pybind11::int_, pybind11::int_, pybind11::int_>;
using VectorFields = pybind11::typing::Tuple<store::MappedFile, pybind11::int_, pybind11::str,
                                             pybind11::int_, pybind11::int_>;
using Matrix = pybind11::typing::Union<MatrixFields>;
using OptionalMatrix = pybind11::typing::Optional<MatrixFields>;
using OptionalVector = pybind11::typing::Optional<VectorFields>;

// Reads (file, byte offset, format, outputs, inputs, output_stride, input_stride), or None for no
// matrix. Strides of float formats are in elements. Other formats have output_stride in bytes and
// input_stride 0, followed, where scales lie apart, by (file, byte offset, row stride in bytes) of
// these, and where the checkpoint packs them otherwise than the format says, by a tuple (packing,
// dtype of the scales, outputs per scale, inputs per scale, (file, byte offset, row stride in
// bytes) of packed zero points or None, what is added to them). The packings are those of
// compute::Packing, in lower case. Raises ConfigError, or CheckpointError for what is not in the
// file.
compute::MatrixView matrix_source(const pybind11::object& source);
// Reads (file, byte offset, dtype, count, stride), or None for no vector.
compute::VectorView vector_source(const pybind11::object& source);

// Returns the files of what matrix_source and vector_source read, each once.
std::vector<std::shared_ptr<store::MappedFile>> files_of(
    std::initializer_list<pybind11::object> sources);

// Reads what matrix_source reads, or (address, format, outputs, inputs, output_stride,
// input_stride) of memory, followed, where scales lie apart, by (address, row stride in bytes).
compute::MatrixView file_or_memory_matrix(const pybind11::object& source);
// Reads what vector_source reads, or (address, dtype, count, stride in elements) of memory.
compute::VectorView file_or_memory_vector(const pybind11::object& source);

}  // namespace dflash::bindings
