// Binds the packed linear layer of a host. Rows are torch's memory, given by address.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/program.h"
#include "bindings/typed.h"
#include "bindings/weight_sources.h"
#include "compute/cpu/packed_linear.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using compute::PackedLinear;

struct LinearBox {
  HostPoolBox pool;
  PackedLinear linear;
};

// Reads (matrix, bias or None, input_column), with the format that is kept behind it where that is
// not the stored one.
compute::LinearPart parse_part(const py::tuple& fields) {
  if (fields.size() != 3 && fields.size() != 4)
    raise(Error{ErrorCode::kInvalidArgument, "a part of a linear layer has 3 or 4 fields"});
  compute::LinearPart part;
  part.matrix = file_or_memory_matrix(fields[0]);
  part.bias = file_or_memory_vector(fields[1]);
  part.input_column = py::cast<uint32_t>(fields[2]);
  if (fields.size() == 4)
    part.resident = unwrap(compute::parse_weight_format(py::cast<std::string>(fields[3])));
  return part;
}

using PartFields = py::typing::Tuple<py::object, py::ellipsis>;

std::unique_ptr<LinearBox> make_linear(const HostPoolBox& pool,
                                       const SequenceOf<PartFields>& sources,
                                       const std::string& numerics) {
  const compute::NumericsClass wanted = unwrap(compute::parse_numerics(numerics));
  std::vector<compute::LinearPart> parts;
  for (const py::handle& source : sources) parts.push_back(parse_part(py::cast<py::tuple>(source)));
  Result<PackedLinear> linear = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    compute::YieldingProgress progress;
    linear = PackedLinear::create(parts, wanted, pool.isa, *pool.arena, progress);
  }
  return std::make_unique<LinearBox>(LinearBox{pool, unwrap(std::move(linear))});
}

compute::FirstReads first_reads(const LinearBox& self, uint32_t num_rows) {
  return self.linear.first_reads(num_rows, self.pool.pool->num_threads(),
                                 self.linear.resident_bytes());
}

auto multiplication(const LinearBox& self, uintptr_t rows_address, size_t row_stride_bytes,
                    const std::string& row_dtype, uint32_t num_rows, uintptr_t out_address,
                    size_t out_stride_bytes, const std::string& out_dtype,
                    uintptr_t residual_address, size_t residual_stride_bytes,
                    const std::string& residual_dtype) {
  const compute::RowsView rows{reinterpret_cast<const std::byte*>(rows_address),
                               parse_dtype(row_dtype), row_stride_bytes, num_rows};
  const compute::RowsTarget out{reinterpret_cast<std::byte*>(out_address), parse_dtype(out_dtype),
                                out_stride_bytes};
  const compute::RowsView residual{reinterpret_cast<const std::byte*>(residual_address),
                                   parse_dtype(residual_dtype), residual_stride_bytes, num_rows};
  return [=, &self] {
    return self.linear.run(*self.pool.pool, *self.pool.scratch->lend(), rows, out,
                           residual.data == nullptr ? nullptr : &residual);
  };
}

using Outputs = SequenceOf<std::tuple<uintptr_t, size_t, std::string>>;

// Each of `outs` is (address, stride in bytes, dtype) of the layer at its place.
auto joint_multiplication(const SequenceOf<LinearBox>& linears, uintptr_t rows_address,
                          size_t row_stride_bytes, const std::string& row_dtype, uint32_t num_rows,
                          const Outputs& outs) {
  if (linears.size() == 0 || linears.size() != outs.size()) {
    raise(Error{ErrorCode::kInvalidArgument,
                "there must be an output for each of one or more linear layers"});
  }
  std::vector<compute::LinearProduct> products;
  const LinearBox* first = nullptr;
  for (size_t i = 0; i < linears.size(); ++i) {
    const auto& box = py::cast<const LinearBox&>(linears[i]);
    const auto out = py::cast<py::tuple>(outs[i]);
    if (out.size() != 3)
      raise(Error{ErrorCode::kInvalidArgument, "an output is (address, stride in bytes, dtype)"});
    if (first == nullptr) first = &box;
    if (box.pool.pool != first->pool.pool)
      raise(Error{ErrorCode::kInvalidArgument, "linear layers of several pools in one call"});
    products.push_back({
        &box.linear,
        {reinterpret_cast<std::byte*>(py::cast<uintptr_t>(out[0])),
                    parse_dtype(py::cast<std::string>(out[2])), py::cast<size_t>(out[1])}
    });
  }
  const compute::RowsView rows{reinterpret_cast<const std::byte*>(rows_address),
                               parse_dtype(row_dtype), row_stride_bytes, num_rows};
  return [first, rows, products = std::move(products)] {
    return PackedLinear::run_together(*first->pool.pool, *first->pool.scratch->lend(), rows,
                                      products);
  };
}

void gather(const LinearBox& self, uintptr_t ids_address, size_t num_ids, uintptr_t out_address,
            size_t out_stride_bytes, const std::string& out_dtype) {
  if (num_ids != 0 && ids_address == 0)
    raise(Error{ErrorCode::kInvalidArgument, "ids cannot lie at address 0"});
  const std::span<const int64_t> ids{reinterpret_cast<const int64_t*>(ids_address), num_ids};
  const compute::RowsTarget out{reinterpret_cast<std::byte*>(out_address), parse_dtype(out_dtype),
                                out_stride_bytes};
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    status = self.linear.gather(*self.pool.pool, ids, out);
  }
  unwrap(std::move(status));
}

void append_multiplication(Program& program, const LinearBox& self, uintptr_t rows_address,
                           size_t row_stride_bytes, const std::string& row_dtype, uint32_t num_rows,
                           uintptr_t out_address, size_t out_stride_bytes,
                           const std::string& out_dtype, uintptr_t residual_address,
                           size_t residual_stride_bytes, const std::string& residual_dtype) {
  const auto compute = multiplication(self, rows_address, row_stride_bytes, row_dtype, num_rows,
                                      out_address, out_stride_bytes, out_dtype, residual_address,
                                      residual_stride_bytes, residual_dtype);
  program.append_product([compute](ProgramRun&) { return compute(); }, *self.pool.pool,
                         first_reads(self, num_rows));
}

void append_joint_multiplication(Program& program, const SequenceOf<LinearBox>& linears,
                                 uintptr_t rows_address, size_t row_stride_bytes,
                                 const std::string& row_dtype, uint32_t num_rows,
                                 const Outputs& outs) {
  const auto compute =
      joint_multiplication(linears, rows_address, row_stride_bytes, row_dtype, num_rows, outs);
  const auto& first = py::cast<const LinearBox&>(linears[0]);
  size_t all_bytes = 0;
  for (size_t i = 0; i < linears.size(); ++i)
    all_bytes += py::cast<const LinearBox&>(linears[i]).linear.resident_bytes();
  program.append_product(
      [compute](ProgramRun&) { return compute(); }, *first.pool.pool,
      first.linear.first_reads(num_rows, first.pool.pool->num_threads(), all_bytes));
}

void append_embedding(Program& program, const LinearBox& self, uintptr_t out_address,
                      size_t out_stride_bytes, const std::string& out_dtype) {
  const compute::RowsTarget out{reinterpret_cast<std::byte*>(out_address), parse_dtype(out_dtype),
                                out_stride_bytes};
  program.append([&self, out](ProgramRun& run) {
    return self.linear.gather(*self.pool.pool, run.inputs().token_ids, out);
  });
}

void append_head(Program& program, const LinearBox& self, uintptr_t rows_address,
                 size_t row_stride_bytes, const std::string& row_dtype, uint32_t num_rows) {
  const compute::RowsView rows{reinterpret_cast<const std::byte*>(rows_address),
                               parse_dtype(row_dtype), row_stride_bytes, num_rows};
  const auto run_head = [&self, rows](ProgramRun& run) -> Status {
    const compute::RowsTarget out{run.inputs().logits, Dtype::kF32,
                                  self.linear.outputs() * sizeof(float)};
    return self.linear.run(*self.pool.pool, *self.pool.scratch->lend(), rows, out);
  };
  program.append_product(run_head, *self.pool.pool, first_reads(self, num_rows));
}

template <class Name>  // name(part) -> const char*
std::vector<std::string> names(const LinearBox& self, const Name& name) {
  std::vector<std::string> found;
  for (size_t part = 0; part < self.linear.num_parts(); ++part) found.emplace_back(name(part));
  return found;
}

}  // namespace

void bind_linear(py::module_& module) {
  py::class_<LinearBox>(
      module, "PackedLinear",
      "Matrices with equal inputs, packed for the kernels of the pool, and their products with "
      "rows. A row's bits depend on nothing but the row and the weights. Any thread may use it.")
      .def(py::init(&make_linear), py::arg("pool"), py::arg("parts"), py::kw_only(),
           py::arg("numerics"),
           "A part is (matrix, bias or None, input_column); a fourth field names the format that "
           "is kept, where that is not the stored one (int8_g32, int4_g32). The matrix is what "
           "ResidentShard.load_expert takes, or one in memory: (address, format, outputs, inputs, "
           "output_stride, input_stride), followed, where scales lie apart, by (address, row "
           "stride in bytes) of these. Strides of float formats are in elements; other formats "
           "have output_stride in bytes and input_stride 0. A bias in memory is (address, dtype, "
           "count, stride), with the stride in elements. Memory and files are not used afterwards. "
           "ConfigError, UnsupportedError and CheckpointError name the part.")
      .def("run", at_once(&multiplication), py::arg("rows_address"), py::arg("row_stride_bytes"),
           py::arg("row_dtype"), py::arg("num_rows"), py::arg("out_address"),
           py::arg("out_stride_bytes"), py::arg("out_dtype"), py::arg("residual_address") = 0,
           py::arg("residual_stride_bytes") = 0, py::arg("residual_dtype") = "f32",
           "Multiplies rows [num_rows, row_width] and writes [num_rows, outputs], rounded once. "
           "The residual [num_rows, outputs] is added before that; it may be the output's memory. "
           "WorkerError names the first row and column of a value that only out_dtype cannot hold.")
      .def("gather", &gather, py::arg("ids_address"), py::arg("num_ids"), py::arg("out_address"),
           py::arg("out_stride_bytes"), py::arg("out_dtype"),
           "Writes the weights of outputs `ids` (int64) as rows [num_ids, inputs], widened exactly "
           "and rounded once. ConfigError for an id that is not there.")
      .def_property_readonly(
          "address",
          [](const LinearBox& self) { return reinterpret_cast<uintptr_t>(&self.linear); },
          "What OperatorTimes.subject names it by.")
      .def_property_readonly(
          "inputs", [](const LinearBox& self) { return self.linear.inputs(); },
          "Elements of a row that each part reads.")
      .def_property_readonly(
          "outputs", [](const LinearBox& self) { return self.linear.outputs(); },
          "Of all parts together, side by side in their order.")
      .def_property_readonly(
          "row_width", [](const LinearBox& self) { return self.linear.row_width(); },
          "Elements of a row that are read, from its first on.")
      .def_property_readonly("resident_bytes",
                             [](const LinearBox& self) { return self.linear.resident_bytes(); })
      .def_property_readonly(
          "formats",
          [](const LinearBox& self) {
            return names(
                self, [&](size_t part) { return compute::format_name(self.linear.format(part)); });
          },
          "Of each part: the format that is kept.")
      .def_property_readonly(
          "numerics",
          [](const LinearBox& self) {
            return names(self, [&](size_t part) {
              return compute::numerics_name(self.linear.numerics(part));
            });
          },
          "Of each part: the numerics class, which is the default one where the wanted one does "
          "not take the format.");
  module.def(
      "run_together", at_once(&joint_multiplication), py::arg("linears"), py::arg("rows_address"),
      py::arg("row_stride_bytes"), py::arg("row_dtype"), py::arg("num_rows"), py::arg("outs"),
      "Does what `run` of each layer does for the same rows, in one job of their one pool; an "
      "output is (address, stride in bytes, dtype). ConfigError for layers of several pools.");
  program_class(module)
      .def("run_together", &append_joint_multiplication, py::keep_alive<1, 2>(), py::arg("linears"),
           py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
           py::arg("num_rows"), py::arg("outs"), "As run_together of this module.")
      .def("multiply", &append_multiplication, py::keep_alive<1, 2>(), py::arg("linear"),
           py::arg("rows_address"), py::arg("row_stride_bytes"), py::arg("row_dtype"),
           py::arg("num_rows"), py::arg("out_address"), py::arg("out_stride_bytes"),
           py::arg("out_dtype"), py::arg("residual_address") = 0,
           py::arg("residual_stride_bytes") = 0, py::arg("residual_dtype") = "f32",
           "As PackedLinear.run.")
      .def("embed", &append_embedding, py::keep_alive<1, 2>(), py::arg("linear"),
           py::arg("out_address"), py::arg("out_stride_bytes"), py::arg("out_dtype"),
           "As PackedLinear.gather, of the step's token ids.")
      .def("head", &append_head, py::keep_alive<1, 2>(), py::arg("linear"), py::arg("rows_address"),
           py::arg("row_stride_bytes"), py::arg("row_dtype"), py::arg("num_rows"),
           "As PackedLinear.run, into the logits of the step.");
}

}  // namespace dflash::bindings
