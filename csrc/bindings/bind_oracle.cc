// FfnOracle: experts that one named kernel set computes in this process, for tests and `verify`. It
// takes and returns NumPy arrays.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "bindings/arguments.h"
#include "bindings/typed.h"
#include "compute/cpu/cpu_backend.h"
#include "compute/reference/reference.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using IndexArray = py::array_t<uint16_t, py::array::c_style | py::array::forcecast>;

// The arrays of one expert in the layer's source formats, kept alive for the float64 oracle.
struct OwnedWeights {
  std::vector<std::vector<std::byte>> storage;
  compute::ExpertWeights views;
};

class FfnOracle {
 public:
  FfnOracle(const Fields& spec, uint32_t num_experts, const std::string& weight_dtype,
            const std::string& isa, uint32_t num_threads, const std::string& numerics_name)
      : spec_(parse_ffn_spec(spec)),
        formats_(unwrap(compute::parse_resident_formats(weight_dtype))),
        owned_(num_experts) {
    const compute::Isa set = unwrap(compute::parse_isa(isa));
    const compute::NumericsClass numerics = unwrap(compute::parse_numerics(numerics_name));
    backend_ = unwrap(compute::CpuBackend::create(set, num_threads));
    layer_ = unwrap(backend_->create_layer(spec_, num_experts, formats_, numerics));
  }

  void load_expert(uint32_t expert_id, const py::object& gate, const py::object& up,
                   const py::object& down, const py::object& gate_bias, const py::object& up_bias,
                   const py::object& down_bias) {
    if (expert_id >= owned_.size())
      raise(Error{ErrorCode::kInvalidArgument, "expert_id is out of range"});
    auto owned = std::make_unique<OwnedWeights>();
    owned->views.gate = matrix(*owned, gate, formats_.gate_up);
    owned->views.up = matrix(*owned, up, formats_.gate_up);
    owned->views.down = matrix(*owned, down, formats_.down);
    owned->views.gate_bias = vector(*owned, gate_bias);
    owned->views.up_bias = vector(*owned, up_bias);
    owned->views.down_bias = vector(*owned, down_bias);
    unwrap(layer_->load_expert(expert_id, owned->views, progress_));
    owned_[expert_id] = std::move(owned);
  }

  py::array forward(const FloatArray& rows, const IndexArray& counts, const IndexArray& ids,
                    const FloatArray& weights, const std::string& row_dtype,
                    const std::string& reply_dtype) {
    const Dtype in = parse_dtype(row_dtype), out = parse_dtype(reply_dtype);
    std::vector<std::byte> wire_rows(static_cast<size_t>(rows.size()) * dtype_bytes(in));
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(rows.data()), in, wire_rows.data(),
            static_cast<size_t>(rows.size()));
    compute::ForwardArgs args = arguments(rows, counts, ids, weights);
    args.rows = wire_rows.data();
    args.row_dtype = in;
    args.reply_dtype = out;
    const std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(args.num_rows),
                                            static_cast<py::ssize_t>(spec_.out_size)};
    py::array reply = out == Dtype::kF32 ? py::array(py::dtype::of<float>(), shape)
                                         : py::array(py::dtype::of<uint16_t>(), shape);
    args.reply = static_cast<std::byte*>(reply.mutable_data());
    Status status = ok();
    {
      py::gil_scoped_release unlocked;
      status = layer_->forward(args, progress_);
    }
    unwrap(std::move(status));
    return reply;
  }

  py::array_t<double> forward_float64(const FloatArray& rows, const IndexArray& counts,
                                      const IndexArray& ids, const FloatArray& weights) {
    std::vector<compute::ExpertWeights> experts;
    for (const auto& owned : owned_)
      experts.push_back(owned == nullptr ? compute::ExpertWeights{} : owned->views);
    compute::ForwardArgs args = arguments(rows, counts, ids, weights);
    args.rows = reinterpret_cast<const std::byte*>(rows.data());
    const std::vector<double> sums = compute::forward_float64(spec_, experts, args);
    py::array_t<double> result(
        {static_cast<py::ssize_t>(args.num_rows), static_cast<py::ssize_t>(spec_.out_size)});
    std::copy(sums.begin(), sums.end(), result.mutable_data());
    return result;
  }

 private:
  // Checks what the kernels trust: shapes agree, and ids are in range and loaded.
  compute::ForwardArgs arguments(const FloatArray& rows, const IndexArray& counts,
                                 const IndexArray& ids, const FloatArray& weights) const {
    if (rows.ndim() != 2 || rows.shape(1) != static_cast<py::ssize_t>(spec_.in_size)) {
      raise(Error{ErrorCode::kInvalidArgument,
                  "rows must be [num_rows, " + std::to_string(spec_.in_size) + "]"});
    }
    size_t pairs = 0;
    for (py::ssize_t r = 0; r < counts.size(); ++r) pairs += counts.data()[r];
    if (counts.size() != rows.shape(0) || ids.size() != weights.size() ||
        static_cast<size_t>(ids.size()) != pairs) {
      raise(Error{ErrorCode::kInvalidArgument,
                  "row_counts, local_expert_ids and weights do not describe the rows"});
    }
    for (py::ssize_t i = 0; i < ids.size(); ++i) {
      if (ids.data()[i] >= owned_.size() || owned_[ids.data()[i]] == nullptr) {
        raise(Error{ErrorCode::kInvalidArgument,
                    "expert " + std::to_string(ids.data()[i]) + " is not loaded"});
      }
    }
    compute::ForwardArgs args;
    args.num_rows = static_cast<uint32_t>(rows.shape(0));
    args.row_counts = {counts.data(), static_cast<size_t>(counts.size())};
    args.local_expert_ids = {ids.data(), static_cast<size_t>(ids.size())};
    args.weights = {weights.data(), static_cast<size_t>(weights.size())};
    return args;
  }

  // The dtype of given weights. Values are rounded to a float format; the layer itself makes
  // int8_g32 and int4_g32 from float32.
  static Dtype source_dtype(compute::WeightFormat format) {
    return compute::is_float(format) ? compute::dtype_of(format) : Dtype::kF32;
  }

  static const std::byte* store(OwnedWeights& owned, const FloatArray& values, Dtype dtype) {
    owned.storage.emplace_back(static_cast<size_t>(values.size()) * dtype_bytes(dtype));
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(values.data()), dtype,
            owned.storage.back().data(), static_cast<size_t>(values.size()));
    return owned.storage.back().data();
  }

  static const std::byte* store(OwnedWeights& owned, const py::buffer_info& bytes) {
    const auto* first = static_cast<const std::byte*>(bytes.ptr);
    owned.storage.emplace_back(first, first + bytes.size * bytes.itemsize);
    return owned.storage.back().data();
  }

  // Reads (format, bytes, outputs, inputs, bytes of the scales or b""): a matrix as a checkpoint
  // has it.
  static compute::MatrixView stored_matrix(OwnedWeights& owned, const py::tuple& parts) {
    if (parts.size() != 5) raise(Error{ErrorCode::kInvalidArgument, "a stored matrix has 5 parts"});
    const ByteMatrix source = byte_matrix(
        py::cast<std::string>(parts[0]), py::cast<py::buffer>(parts[1]),
        py::cast<uint32_t>(parts[2]), py::cast<uint32_t>(parts[3]), py::cast<py::buffer>(parts[4]));
    compute::MatrixView view = source.view;
    view.data = store(owned, source.data);
    if (view.scales != nullptr) view.scales = store(owned, source.scales);
    return view;
  }

  static compute::MatrixView matrix(OwnedWeights& owned, const py::object& value,
                                    compute::WeightFormat format) {
    if (value.is_none()) return {};
    if (py::isinstance<py::tuple>(value)) return stored_matrix(owned, py::cast<py::tuple>(value));
    const auto values = py::cast<FloatArray>(value);
    if (values.ndim() != 2)
      raise(Error{ErrorCode::kInvalidArgument, "a weight matrix must have two dimensions"});
    const Dtype dtype = source_dtype(format);
    return {store(owned, values, dtype),
            compute::format_of(dtype),
            static_cast<uint32_t>(values.shape(0)),
            static_cast<uint32_t>(values.shape(1)),
            values.shape(1),
            1};
  }

  compute::VectorView vector(OwnedWeights& owned, const py::object& value) const {
    if (value.is_none()) return {};
    const auto values = py::cast<FloatArray>(value);
    if (values.ndim() != 1)
      raise(Error{ErrorCode::kInvalidArgument, "a bias must have one dimension"});
    const Dtype dtype = source_dtype(formats_.gate_up);
    return {store(owned, values, dtype), dtype, static_cast<uint32_t>(values.shape(0)), 1};
  }

  compute::FfnSpec spec_;
  compute::ResidentFormats formats_;
  std::unique_ptr<compute::CpuBackend> backend_;
  std::unique_ptr<compute::ExpertLayer> layer_;
  std::vector<std::unique_ptr<OwnedWeights>> owned_;
  compute::YieldingProgress progress_{0};
};

}  // namespace

void bind_oracle(py::module_& module) {
  py::class_<FfnOracle>(module, "FfnOracle",
                        "Experts that are loaded like a worker's and computed in this process by "
                        "one kernel set (\"reference\" ... \"avx512\").")
      .def(py::init<const Fields&, uint32_t, const std::string&, const std::string&, uint32_t,
                    const std::string&>(),
           py::kw_only(), py::arg("spec"), py::arg("num_experts"), py::arg("weight_dtype"),
           py::arg("isa"), py::arg("num_threads") = 1,
           py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics))
      .def("load_expert", &FfnOracle::load_expert, py::arg("expert_id"), py::kw_only(),
           py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("gate_bias") = py::none(),
           py::arg("up_bias") = py::none(), py::arg("down_bias") = py::none(),
           "Matrices are 2-D and biases 1-D arrays of float32, which are rounded to weight_dtype. "
           "A matrix may also be (format, bytes, outputs, inputs, scales or b\"\").")
      .def("forward", &FfnOracle::forward, py::arg("rows"), py::arg("row_counts"),
           py::arg("local_expert_ids"), py::arg("weights"), py::kw_only(),
           py::arg("row_dtype") = "f32", py::arg("reply_dtype") = "f32",
           "Rows and result are NumPy arrays of float32, or of uint16 bit patterns for 16-bit "
           "dtypes.")
      .def("forward_float64", &FfnOracle::forward_float64, py::arg("rows"), py::arg("row_counts"),
           py::arg("local_expert_ids"), py::arg("weights"));
}

}  // namespace dflash::bindings
