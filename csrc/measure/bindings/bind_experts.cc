// Binds what `bench experts` measures; see measure/layer_benchmark.h and peaks.h.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/typed.h"
#include "measure/layer_benchmark.h"
#include "measure/peaks.h"

namespace py = pybind11;

namespace dflash::measure {
namespace {

using bindings::BackendDevice;
using bindings::parse_dtype;
using bindings::parse_ffn_spec;
using bindings::raise;
using bindings::SharedBackend;
using bindings::unwrap;

using FloatArray = py::array_t<float, py::array::c_style | py::array::forcecast>;
using IndexArray = py::array_t<uint16_t, py::array::c_style | py::array::forcecast>;

class PyLayerBenchmark {
 public:
  PyLayerBenchmark(const bindings::Fields& spec, uint32_t num_experts, uint32_t num_layers,
                   const std::string& weight_dtype, const std::string& isa, uint32_t num_threads,
                   uint64_t seed, const std::string& numerics, const BackendDevice* device)
      : is_on_device_(device != nullptr) {
    LayerBenchmarkOptions& options = options_;
    options.spec = parse_ffn_spec(spec);
    options.num_experts = num_experts;
    options.num_layers = num_layers;
    options.formats = unwrap(compute::parse_resident_formats(weight_dtype));
    options.isa = unwrap(compute::parse_isa(isa));
    options.num_threads = num_threads;
    options.seed = seed;
    options.numerics = unwrap(compute::parse_numerics(numerics));
    Result<std::unique_ptr<LayerBenchmark>> made = [&] {
      py::gil_scoped_release unlocked;
      std::unique_ptr<compute::ExpertBackend> backend;
      if (device != nullptr) backend = std::make_unique<SharedBackend>(device->backend);
      return LayerBenchmark::create(options, std::move(backend));
    }();
    benchmark_ = unwrap(std::move(made));
  }

  std::vector<int64_t> run(const FloatArray& rows, const IndexArray& counts, const IndexArray& ids,
                           const FloatArray& weights, const std::string& row_dtype,
                           uint32_t rounds) {
    const compute::FfnSpec& spec = benchmark_->spec();
    const Dtype dtype = parse_dtype(row_dtype);
    if (rows.ndim() != 2 || rows.shape(1) != static_cast<py::ssize_t>(spec.in_size)) {
      raise(Error{ErrorCode::kInvalidArgument,
                  "rows must be [num_rows, " + std::to_string(spec.in_size) + "]"});
    }
    const auto num_rows = static_cast<size_t>(rows.shape(0));
    std::vector<std::byte> wire_rows(static_cast<size_t>(rows.size()) * dtype_bytes(dtype));
    convert(Dtype::kF32, reinterpret_cast<const std::byte*>(rows.data()), dtype, wire_rows.data(),
            static_cast<size_t>(rows.size()));
    std::vector<std::byte> reply(num_rows * spec.out_size * dtype_bytes(dtype));
    compute::ForwardArgs args;
    args.rows = wire_rows.data();
    args.row_dtype = args.reply_dtype = dtype;
    args.num_rows = static_cast<uint32_t>(num_rows);
    args.row_counts = {counts.data(), static_cast<size_t>(counts.size())};
    args.local_expert_ids = {ids.data(), static_cast<size_t>(ids.size())};
    args.weights = {weights.data(), static_cast<size_t>(weights.size())};
    args.reply = reply.data();
    Result<std::vector<int64_t>> samples = [&] {
      py::gil_scoped_release unlocked;
      return benchmark_->run(args, rounds);
    }();
    return unwrap(std::move(samples));
  }

  std::vector<int64_t> run_gemm(uint32_t rows_per_expert, uint32_t rounds) {
    if (is_on_device_)
      raise(Error{ErrorCode::kUnsupported,
                  "the matrix products alone are timed on the processor only"});
    py::gil_scoped_release unlocked;
    if (gemm_ == nullptr) {
      auto made = GemmBenchmark::create(options_);
      if (!made.ok()) {
        py::gil_scoped_acquire locked;
        raise(std::move(made).error());
      }
      gemm_ = std::move(made).value();
    }
    return gemm_->run(rows_per_expert, rounds);
  }

  uint64_t resident_bytes() const { return benchmark_->resident_bytes(); }
  int64_t device_ns() const { return benchmark_->device_ns(); }

 private:
  const bool is_on_device_;
  LayerBenchmarkOptions options_;
  std::unique_ptr<GemmBenchmark> gemm_;  // made when it is first asked for
  std::unique_ptr<LayerBenchmark> benchmark_;
};

// Binds a function of peaks.h: the set is given by its name, and the GIL is released meanwhile.
template <auto kMeasure, class Effort>
std::vector<double> peak_of(const std::string& isa, uint32_t num_threads, uint32_t rounds,
                            Effort effort) {
  const compute::Isa set = unwrap(compute::parse_isa(isa));
  Result<std::vector<double>> found = [&] {
    py::gil_scoped_release unlocked;
    return kMeasure(set, num_threads, rounds, effort);
  }();
  return unwrap(std::move(found));
}

template <auto kMeasure>
void bind_multiply_adds(py::module_& module, const char* name, const char* doc) {
  module.def(name, &peak_of<kMeasure, double>, py::arg("isa"), py::arg("num_threads"),
             py::arg("rounds"), py::arg("milliseconds") = 5.0, doc);
}

}  // namespace

void bind_experts(py::module_& module) {
  py::class_<PyLayerBenchmark>(
      module, "LayerBenchmark",
      "`num_layers` layers of one shape with random weights. `run` takes them in turn.")
      .def(py::init<const bindings::Fields&, uint32_t, uint32_t, const std::string&,
                    const std::string&, uint32_t, uint64_t, const std::string&,
                    const BackendDevice*>(),
           py::kw_only(), py::arg("spec"), py::arg("num_experts"), py::arg("num_layers"),
           py::arg("weight_dtype"), py::arg("isa"), py::arg("num_threads"), py::arg("seed") = 1,
           py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics),
           py::arg("device") = nullptr,
           "device: This device computes instead of the kernels of `isa`.")
      .def("run", &PyLayerBenchmark::run, py::arg("rows"), py::arg("row_counts"),
           py::arg("local_expert_ids"), py::arg("weights"), py::kw_only(), py::arg("row_dtype"),
           py::arg("rounds"),
           "Returns the nanoseconds of each round. Rows and weights are NumPy arrays of float32, "
           "counts and ids of uint16.")
      .def("run_gemm", &PyLayerBenchmark::run_gemm, py::kw_only(), py::arg("rows_per_expert"),
           py::arg("rounds"),
           "Returns the nanoseconds of each round of the matrix products alone, with the same "
           "number of rows through every expert.")
      .def("resident_bytes", &PyLayerBenchmark::resident_bytes)
      .def("device_ns", &PyLayerBenchmark::device_ns,
           "The nanoseconds that the device computed in all rounds so far, copies aside; 0 on the "
           "processor.");
  bind_multiply_adds<&multiply_add_per_s>(
      module, "multiply_add_per_s",
      "Returns float32 operations a second; a multiply-add counts two.");
  bind_multiply_adds<&bf16_multiply_add_per_s>(
      module, "bf16_multiply_add_per_s",
      "Returns operations a second with bf16 factors. Only kernel sets with an instruction for "
      "them have it.");
  bind_multiply_adds<&integer_multiply_add_per_s>(
      module, "integer_multiply_add_per_s",
      "Returns operations a second of int8 products and int32 sums, two for each product. Only the "
      "vector sets of x86-64 have it.");
  module.def("read_bytes_per_s", &peak_of<&read_bytes_per_s, size_t>, py::arg("isa"),
             py::arg("num_threads"), py::arg("rounds"), py::arg("num_bytes"),
             "Returns bytes a second; each thread reads `num_bytes`.");
}

}  // namespace dflash::measure
