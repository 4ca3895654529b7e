// The mapped checkpoint files and the expert worker that packs its experts out of them.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/backend_device.h"
#include "bindings/module.h"
#include "store/mapped_file.h"
#include "worker/expert_worker.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using store::MappedFile;
using worker::ExpertWorker;
using worker::LayerShard;

// (file, byte offset, format, outputs, inputs, output_stride, input_stride); None: absent. Float
// formats: strides in elements. Others: output_stride in bytes and input_stride 0, then (file, byte
// offset, row stride in bytes) of the scales where they lie apart.
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

// (file, byte offset, dtype, count, stride); None: absent.
compute::VectorView vector_source(const py::object& source) {
  if (source.is_none()) return {};
  const auto parts = py::cast<py::tuple>(source);
  if (parts.size() != 5) raise(Error{ErrorCode::kInvalidArgument, "a vector source has 5 parts"});
  const auto& file = py::cast<const MappedFile&>(parts[0]);
  return unwrap(file.vector(py::cast<uint64_t>(parts[1]),
                            parse_dtype(py::cast<std::string>(parts[2])),
                            py::cast<uint32_t>(parts[3]), py::cast<int64_t>(parts[4])));
}

// A worker that computes from the files keeps them open.
void keep_files(const py::object& worker, std::initializer_list<py::object> sources) {
  if (!py::cast<const ExpertWorker&>(worker).is_mapped()) return;
  for (const py::object& source : sources) {
    if (source.is_none()) continue;
    const auto parts = py::cast<py::tuple>(source);
    py::detail::keep_alive_impl(worker, parts[0]);
    if (parts.size() == 10) py::detail::keep_alive_impl(worker, parts[7]);
  }
}

void load_expert(const py::object& worker, uint32_t layer, uint32_t shard, uint32_t local_expert_id,
                 const py::object& gate, const py::object& up, const py::object& down,
                 const py::object& gate_bias, const py::object& up_bias,
                 const py::object& down_bias) {
  const compute::ExpertWeights weights{matrix_source(gate),    matrix_source(up),
                                       matrix_source(down),    vector_source(gate_bias),
                                       vector_source(up_bias), vector_source(down_bias)};
  keep_files(worker, {gate, up, down});
  auto& self = py::cast<ExpertWorker&>(worker);
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    status = self.load_expert(LayerShard{layer, shard}, local_expert_id, weights);
  }
  unwrap(std::move(status));
}

py::dict stats_dict(const ExpertWorker& self) {
  const worker::WorkerStats stats = self.stats();
  py::dict fields;
  fields["calls"] = stats.calls;
  fields["rows"] = stats.rows;
  fields["pairs"] = stats.pairs;
  fields["request_bytes"] = stats.request_bytes;
  fields["reply_bytes"] = stats.reply_bytes;
  fields["errors"] = stats.errors;
  fields["compute_ns"] = stats.compute_ns;
  fields["queue_ns"] = stats.queue_ns;
  fields["busy_since_ns"] = stats.busy_since_ns;
  return fields;
}

// A forked child holds a copy of the object but not of its threads: joining them there would never
// end.
struct DeleteInOwnProcess {
  pid_t owner = ::getpid();
  void operator()(ExpertWorker* worker) const {
    if (::getpid() == owner) delete worker;
  }
};
using WorkerHolder = std::unique_ptr<ExpertWorker, DeleteInOwnProcess>;

WorkerHolder make_worker(const std::string& name, const std::string& isa, uint32_t num_threads,
                         const std::vector<int>& cpus, int64_t spin_ns, double slowdown,
                         const BackendDevice* device, const std::string& weights_layout,
                         uint64_t memory_limit) {
  worker::WorkerOptions options;
  options.name = name;
  options.isa = unwrap(compute::parse_isa(isa));
  options.num_threads = num_threads;
  options.cpus = cpus;
  options.spin_ns = spin_ns;
  options.slowdown = slowdown;
  options.weights_layout = unwrap(compute::parse_weights_layout(weights_layout));
  options.memory_limit = memory_limit;
  std::unique_ptr<compute::ExpertBackend> backend;
  if (device != nullptr) backend = std::make_unique<SharedBackend>(device->backend);
  return WorkerHolder(unwrap(ExpertWorker::create(options, std::move(backend))).release());
}

void serve(ExpertWorker& self, ChannelBox& channel, uint64_t generation) {
  auto taken = channel.take();
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    status = self.serve(std::move(taken), generation);
  }
  unwrap(std::move(status));
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<MappedFile>(module, "MappedFile")
      .def(py::init([](const std::string& path) { return unwrap(MappedFile::open(path)); }),
           py::arg("path"))
      .def_property_readonly("size", &MappedFile::size_bytes)
      .def(
          "read",
          [](const MappedFile& self, uint64_t offset, uint64_t num_bytes) {
            const auto view = unwrap(self.bytes(offset, num_bytes));
            return py::bytes(reinterpret_cast<const char*>(view.data()), view.size());
          },
          py::arg("offset"), py::arg("num_bytes"))
      .def("drop_pages", &MappedFile::drop_pages);
}

void bind_worker(py::module_& module) {
  py::class_<ExpertWorker, WorkerHolder>(module, "Worker")
      .def(py::init(&make_worker), py::kw_only(), py::arg("name"), py::arg("isa"),
           py::arg("num_threads"), py::arg("cpus") = std::vector<int>{}, py::arg("spin_ns") = 0,
           py::arg("slowdown") = 1.0, py::arg("device") = nullptr,
           py::arg("weights_layout") = "packed", py::arg("memory_limit") = 0)
      .def(
          "define_shard",
          [](ExpertWorker& self, uint32_t layer, uint32_t shard, const py::dict& spec,
             uint32_t num_local_experts, const std::string& weight_dtype,
             uint64_t weights_fingerprint, const std::string& numerics) {
            unwrap(
                self.define_shard(LayerShard{layer, shard}, parse_ffn_spec(spec), num_local_experts,
                                  unwrap(compute::parse_resident_formats(weight_dtype)),
                                  weights_fingerprint, unwrap(compute::parse_numerics(numerics))));
          },
          py::arg("layer"), py::arg("shard"), py::arg("spec"), py::arg("num_local_experts"),
          py::arg("weight_dtype"), py::arg("weights_fingerprint"),
          py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics))
      .def("load_expert", &load_expert, py::arg("layer"), py::arg("shard"),
           py::arg("local_expert_id"), py::kw_only(), py::arg("gate"), py::arg("up"),
           py::arg("down"), py::arg("gate_bias") = py::none(), py::arg("up_bias") = py::none(),
           py::arg("down_bias") = py::none())
      .def(
          "start_pulse", [](ExpertWorker& self, int fd) { unwrap(self.start_pulse(OwnedFd(fd))); },
          py::arg("fd"))
      .def("stop_pulse", &ExpertWorker::stop_pulse, py::call_guard<py::gil_scoped_release>())
      .def("serve", &serve, py::arg("channel"), py::arg("generation"))
      .def("stop", &ExpertWorker::stop, py::arg("generation"))
      .def("progress", &ExpertWorker::progress)
      .def("stats", &stats_dict)
      .def("resident_bytes", &ExpertWorker::resident_bytes);
}

}  // namespace dflash::bindings
