// Binds mapped checkpoint files, the store of shards that are loaded out of them, and the expert
// worker that serves such shards.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/typed.h"
#include "bindings/weight_sources.h"
#include "compute/cpu/cpu_backend.h"
#include "store/mapped_file.h"
#include "store/scrubber.h"
#include "store/shard_store.h"
#include "transport/loopback/loopback.h"
#include "worker/expert_worker.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using store::MappedFile;
using store::ResidentShard;
using store::ShardStore;
using worker::ExpertWorker;
using worker::LayerShard;

struct StoreBox {
  std::shared_ptr<ShardStore> store;
  bool is_mapped;  // whether its shards compute from the files
};

// The loan of a shard as Python holds it while it loads.
struct LoanBox {
  py::object store;
  std::shared_ptr<ResidentShard> shard;

  const std::shared_ptr<ResidentShard>& get() const {
    if (shard == nullptr) raise(Error{ErrorCode::kClosed, "this shard was given back"});
    return shard;
  }
};

// Loads with `load`, without the GIL. Pages of a file that cannot be read have zeros, which must
// not pass for weights.
template <typename Load>
void load_from(ResidentShard& shard, const std::vector<std::shared_ptr<MappedFile>>& files,
               bool is_mapped, const Load& load) {
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    std::vector<uint64_t> before;
    for (const auto& file : files) {
      before.push_back(file->num_faults());
      if (is_mapped && status.ok()) status = shard.compute_from(file);
    }
    if (status.ok()) status = load();
    for (size_t i = 0; status.ok() && i < files.size(); ++i) {
      if (files[i]->num_faults() != before[i])
        status = Error{
            ErrorCode::kCheckpoint,
            files[i]->path() + ": a page of it cannot be read: it was cut off, or its disk fails"};
    }
  }
  unwrap(std::move(status));
}

compute::ExpertWeights weights_of(const OptionalMatrix& gate, const Matrix& up, const Matrix& down,
                                  const OptionalVector& gate_bias, const OptionalVector& up_bias,
                                  const OptionalVector& down_bias) {
  return {matrix_source(gate),      matrix_source(up),      matrix_source(down),
          vector_source(gate_bias), vector_source(up_bias), vector_source(down_bias)};
}

// The arguments keep the files open until the shard does so.
void load_expert(const LoanBox& self, uint32_t local_expert_id, const OptionalMatrix& gate,
                 const Matrix& up, const Matrix& down, const OptionalVector& gate_bias,
                 const OptionalVector& up_bias, const OptionalVector& down_bias) {
  const compute::ExpertWeights weights = weights_of(gate, up, down, gate_bias, up_bias, down_bias);
  const auto files = files_of({gate, up, down, gate_bias, up_bias, down_bias});
  const auto& box = py::cast<const StoreBox&>(self.store);
  const std::shared_ptr<ResidentShard> shard = self.get();
  load_from(*shard, files, box.is_mapped, [&]() -> Status {
    DFLASH_TRY(box.store->load_expert(shard, local_expert_id, weights));
    if (shard->keeps_sources(local_expert_id))
      for (const auto& file : files) shard->keep_file(file);
    return ok();
  });
}

void reload_expert(const LoanBox& self, uint32_t local_expert_id, const OptionalMatrix& gate,
                   const Matrix& up, const Matrix& down, const OptionalVector& gate_bias,
                   const OptionalVector& up_bias, const OptionalVector& down_bias) {
  const compute::ExpertWeights weights = weights_of(gate, up, down, gate_bias, up_bias, down_bias);
  const auto& box = py::cast<const StoreBox&>(self.store);
  const std::shared_ptr<ResidentShard> shard = self.get();
  load_from(*shard, files_of({gate, up, down, gate_bias, up_bias, down_bias}), box.is_mapped,
            [&] { return box.store->reload_expert(*shard, local_expert_id, weights); });
}

// Computes rows beside whatever serves the shard, and returns the reply's rows.
py::bytes compute_rows(const LoanBox& self, const py::bytes& row_bytes,
                       const std::string& row_dtype, const std::vector<uint16_t>& row_counts,
                       const std::vector<uint16_t>& local_expert_ids,
                       const std::vector<float>& weights, const std::string& reply_dtype) {
  const auto rows = static_cast<std::string_view>(row_bytes);
  const std::shared_ptr<ResidentShard> shard = self.get();
  const store::ShardFacts& facts = shard->facts();
  const auto refuse = [](const std::string& what) {
    raise(Error{ErrorCode::kInvalidArgument, "compute_rows: " + what});
  };
  compute::ForwardArgs args;
  args.row_dtype = parse_dtype(row_dtype);
  args.reply_dtype = parse_dtype(reply_dtype);
  args.num_rows = static_cast<uint32_t>(row_counts.size());
  uint64_t num_pairs = 0;
  for (const uint16_t count : row_counts) num_pairs += count;
  if (num_pairs != local_expert_ids.size() || num_pairs != weights.size())
    refuse("row_counts, local_expert_ids and weights name unlike numbers of pairs");
  for (const uint16_t id : local_expert_ids) {
    if (id >= facts.num_local_experts)
      refuse("local expert " + std::to_string(id) + " of " +
             std::to_string(facts.num_local_experts));
  }
  if (rows.size() != uint64_t{args.num_rows} * facts.spec.in_size * dtype_bytes(args.row_dtype))
    refuse("rows have " + std::to_string(rows.size()) + " bytes");
  std::vector<std::byte> reply(uint64_t{args.num_rows} * facts.spec.out_size *
                               dtype_bytes(args.reply_dtype));
  args.rows = reinterpret_cast<const std::byte*>(rows.data());
  args.row_counts = row_counts;
  args.local_expert_ids = local_expert_ids;
  args.weights = weights;
  args.reply = reply.data();
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    compute::YieldingProgress progress;
    status = shard->forward(args, progress);
  }
  unwrap(std::move(status));
  return {reinterpret_cast<const char*>(reply.data()), reply.size()};
}

std::unique_ptr<store::Scrubber> make_scrubber(const StoreBox& store, double period_s) {
  if (!(period_s > 0.0 && period_s <= 1e9))
    raise(Error{ErrorCode::kInvalidArgument, "period_s is not above 0"});
  return std::make_unique<store::Scrubber>(store.store, period_s);
}

// Returns (weights fingerprint, local expert), or nothing once the scrubber was stopped.
std::optional<std::pair<uint64_t, uint32_t>> next_damage(store::Scrubber& self) {
  std::optional<store::Damage> damage;
  {
    py::gil_scoped_release unlocked;
    damage = self.run();
  }
  if (!damage) return std::nullopt;
  return std::pair{damage->weights_fingerprint, damage->local_expert_id};
}

// The checksum, once it is known, and the number of experts that were read.
using Content = std::pair<std::optional<uint64_t>, uint32_t>;

Content content_of(const ResidentShard& shard) {
  store::ContentState content = shard.content();
  if (content.failure) raise(*content.failure);
  return {content.checksum, content.num_read};
}

std::unique_ptr<StoreBox> make_store(const std::string& isa, uint32_t num_threads,
                                     const std::vector<int>& cpus, const BackendDevice* device,
                                     const std::string& weights_layout, uint64_t memory_limit,
                                     const HostPoolBox* pool) {
  const auto layout = unwrap(compute::parse_weights_layout(weights_layout));
  std::shared_ptr<compute::ExpertBackend> backend;
  if (device != nullptr) {
    backend = device->backend;
  } else if (pool != nullptr) {
    backend =
        unwrap(compute::CpuBackend::create(unwrap(compute::parse_isa(isa)), pool->pool, layout));
  } else {
    backend = unwrap(
        compute::CpuBackend::create(unwrap(compute::parse_isa(isa)), num_threads, cpus, layout));
  }
  return std::make_unique<StoreBox>(StoreBox{
      {new ShardStore(std::move(backend), memory_limit), DeleteInOwnProcess()},
      layout == compute::WeightsLayout::kMapped
  });
}

LoanBox borrow(const py::object& self, const Fields& spec, uint32_t num_local_experts,
               const std::string& weight_dtype, uint64_t weights_fingerprint,
               const std::string& numerics) {
  const store::ShardFacts facts{.spec = parse_ffn_spec(spec),
                                .num_local_experts = num_local_experts,
                                .formats = unwrap(compute::parse_resident_formats(weight_dtype)),
                                .numerics = unwrap(compute::parse_numerics(numerics)),
                                .weights_fingerprint = weights_fingerprint};
  ShardStore& store = *py::cast<const StoreBox&>(self).store;
  Result<std::shared_ptr<ResidentShard>> lent = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    lent = store.borrow(facts);
  }
  return {self, unwrap(std::move(lent))};
}

// A reader of an expert's source bytes, with the files that it reads.
struct ReaderBox {
  std::vector<py::object> sources;
  compute::ContentReader reader;
};

Counts stats_dict(const ExpertWorker& self) {
  const worker::WorkerStats stats = self.stats();
  Counts fields;
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

using WorkerHolder = std::shared_ptr<ExpertWorker>;

WorkerHolder make_worker(const std::string& name, int64_t spin_ns, double slowdown) {
  return WorkerHolder(unwrap(ExpertWorker::create({name, spin_ns, slowdown})).release(),
                      DeleteInOwnProcess());
}

void hold(ExpertWorker& self, uint32_t layer, uint32_t shard, const LoanBox& loan) {
  unwrap(self.hold(LayerShard{layer, shard}, loan.get()));
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

// Makes the host's end of a loopback whose requests are computed by whoever waits for them. The
// channel keeps the worker.
std::unique_ptr<ChannelBox> serve_inline(const WorkerHolder& self,
                                         const transport::SlotGeometry& geometry,
                                         uint64_t generation) {
  auto ends = unwrap(transport::make_loopback(geometry));
  self->begin_session(generation);
  auto box = std::make_unique<ChannelBox>();
  box->channel = transport::make_served(
      std::move(ends), [self](transport::Channel& worker) { return self->serve_one(worker); });
  return box;
}

}  // namespace

void bind_store(py::module_& module) {
  py::class_<MappedFile, std::shared_ptr<MappedFile>>(
      module, "MappedFile", "A file mapped for reading until the object dies.")
      .def(py::init([](const std::string& path) {
             return std::shared_ptr<MappedFile>(unwrap(MappedFile::open(path)));
           }),
           py::arg("path"), "CheckpointError is for a file that cannot be mapped.")
      .def_property_readonly("size", &MappedFile::size_bytes)
      .def(
          "read",
          [](const MappedFile& self, uint64_t offset, uint64_t num_bytes) {
            const auto view = unwrap(self.bytes(offset, num_bytes));
            auto copied = py::reinterpret_steal<py::bytes>(
                PyBytes_FromStringAndSize(nullptr, py::ssize_t_cast(view.size())));
            if (!copied) throw py::error_already_set();
            char* to = PyBytes_AS_STRING(copied.ptr());
            unwrap(self.copy(view.data(), view.size(), reinterpret_cast<std::byte*>(to)));
            return copied;
          },
          py::arg("offset"), py::arg("num_bytes"))
      .def("drop_pages", &MappedFile::drop_pages,
           "Resident pages of the file leave this process, by madvise(MADV_DONTNEED).");
}

void bind_shards(py::module_& module) {
  // Before whatever names it, because signatures are written when a function is bound.
  py::class_<LoanBox> loan(module, "ResidentShard",
                           "The loan of a shard. A shard that others use is complete; a new one is "
                           "loaded by the borrower.");
  py::class_<StoreBox>(
      module, "ShardStore",
      "The shards that this process has resident, by weights fingerprint. Any thread may borrow.")
      .def(py::init(&make_store), py::kw_only(), py::arg("isa"), py::arg("num_threads"),
           py::arg("cpus") = std::vector<int>{}, py::arg("device") = nullptr,
           py::arg("weights_layout") = "packed", py::arg("memory_limit") = 0,
           py::arg("pool") = nullptr,
           "device: This device computes instead of the kernels of `isa`.\nweights_layout: With "
           "\"mapped\" it computes from the files, which it keeps open.\nmemory_limit: The weights "
           "may take so many bytes; 0 sets no limit.\npool: These threads compute instead of "
           "threads of its own.")
      .def(
          "borrow", &borrow, py::arg("spec"), py::arg("num_local_experts"), py::arg("weight_dtype"),
          py::arg("weights_fingerprint"),
          py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics),
          "ConfigError is raised where the memory limit does not allow the shard, or somebody else "
          "is loading it.\n\nspec: The keys are those of FfnSpec, enums go by their lower-case "
          "names (\"silu\", \"gated\", \"clamped_swiglu\"), and what is missing has its default.")
      .def("drop_unborrowed", [](const StoreBox& self) { self.store->drop_unborrowed(); })
      .def("resident_bytes", [](const StoreBox& self) { return self.store->resident_bytes(); })
      .def("num_shards", [](const StoreBox& self) { return self.store->num_shards(); });
  loan.def_property_readonly("is_complete",
                             [](const LoanBox& self) { return self.get()->is_complete(); })
      .def("load_expert", &load_expert, py::arg("local_expert_id"), py::kw_only(), py::arg("gate"),
           py::arg("up"), py::arg("down"), py::arg("gate_bias") = py::none(),
           py::arg("up_bias") = py::none(), py::arg("down_bias") = py::none(),
           "Any threads may load different experts at the same time.\n\nA matrix is (file, byte "
           "offset of element (0, 0), dtype, outputs, inputs, output_stride, input_stride), with "
           "strides in elements. Blocks are followed by (file, offset, row stride) of scales that "
           "lie apart, and those by a tuple of their layout where a checkpoint packs them "
           "otherwise (csrc/bindings/weight_sources.h). A vector is (file, byte offset, dtype, "
           "count, stride), with the stride in elements.")
      .def("reload_expert", &reload_expert, py::arg("local_expert_id"), py::kw_only(),
           py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("gate_bias") = py::none(),
           py::arg("up_bias") = py::none(), py::arg("down_bias") = py::none(),
           "Loads an expert again that a scrub has found changed. ConfigError where it is not, "
           "CheckpointError where the source is not what it was.")
      .def("compute_rows", &compute_rows, py::arg("rows"), py::arg("row_dtype"), py::kw_only(),
           py::arg("row_counts"), py::arg("local_expert_ids"), py::arg("weights"),
           py::arg("reply_dtype"),
           "Computes rows [len(row_counts), in_size] on the caller's thread, beside whatever "
           "serves the shard, and returns those of the reply. Pairs are listed row by row, ids "
           "ascend within a row. ConfigError for arguments that do not fit; errors of a worker "
           "that computes.")
      .def(
          "flip_bit",
          [](const LoanBox& self, uint32_t local_expert_id, size_t byte, uint32_t bit) {
            return self.get()->flip_bit(local_expert_id, byte, bit);
          },
          py::arg("local_expert_id"), py::arg("byte"), py::arg("bit"),
          "For tests: changes a bit of the packed bytes; False where the expert has none there.")
      .def(
          "are_packed_as_loaded",
          [](const LoanBox& self, uint32_t begin, uint32_t end) {
            return self.get()->are_packed_as_loaded(begin, end);
          },
          py::arg("begin"), py::arg("end"), py::call_guard<py::gil_scoped_release>(),
          "Sums up the packed bytes of the experts again, without the GIL; any threads may take "
          "different experts. False where one is not what was loaded: the shard is then damaged.")
      .def(
          "content", [](const LoanBox& self) { return content_of(*self.get()); },
          "Returns the content checksum, or None as long as the shard is unchecked, and how many "
          "experts have been read whole. CheckpointError is for files that cannot be read.")
      .def("give_back", [](LoanBox& self) { self.shard.reset(); });
  py::class_<ReaderBox>(module, "ContentReader",
                        "Reads the source bytes of one expert in steps, for its content checksum.")
      .def(
          py::init([](const OptionalMatrix& gate, const Matrix& up, const Matrix& down,
                      const OptionalVector& gate_bias, const OptionalVector& up_bias,
                      const OptionalVector& down_bias) {
            return std::make_unique<ReaderBox>(ReaderBox{
                {gate, up, down, gate_bias, up_bias, down_bias},
                compute::ContentReader(weights_of(gate, up, down, gate_bias, up_bias, down_bias))
            });
          }),
          py::kw_only(), py::arg("gate"), py::arg("up"), py::arg("down"),
          py::arg("gate_bias") = py::none(), py::arg("up_bias") = py::none(),
          py::arg("down_bias") = py::none())
      .def(
          "read",
          [](ReaderBox& self, size_t num_bytes) {
            Result<bool> read = false;
            {
              py::gil_scoped_release unlocked;
              read = self.reader.read(num_bytes);
            }
            return unwrap(std::move(read));
          },
          py::arg("num_bytes"),
          "Reads so many bytes more; True means that all is read. CheckpointError is for files "
          "that cannot be read.")
      .def(
          "value", [](const ReaderBox& self) { return self.reader.value(); },
          "The checksum of the expert, once all is read.");
  py::class_<store::Scrubber>(
      module, "Scrubber", "Sums up the weights of a store again and again (csrc/store/scrubber.h).")
      .def(py::init(&make_scrubber), py::arg("store"), py::kw_only(), py::arg("period_s"),
           "A pass over all of them takes `period_s` seconds. ConfigError where that is not above "
           "0.")
      .def(
          "next_damage", &next_damage,
          "Blocks without the GIL until an expert is found changed, and returns "
          "(weights_fingerprint, local expert), or None once it was stopped. One thread at a time.")
      .def("stop", [](store::Scrubber& self) { self.stop(); })
      .def(
          "stats",
          [](const store::Scrubber& self) {
            const store::ScrubStats stats = self.stats();
            Counts fields;
            fields["scrubbed_bytes"] = stats.scrubbed_bytes;
            fields["scrub_damages"] = stats.damages;
            return fields;
          },
          "scrubbed_bytes, scrub_damages.");
  module.def(
      "shard_checksum",
      [](const std::vector<uint64_t>& experts) { return compute::shard_checksum(experts); },
      py::arg("experts"),
      "The checksum of a shard, from the values of its experts in ascending order of their ids.");
}

void bind_worker(py::module_& module) {
  bind_shards(module);
  py::class_<ExpertWorker, WorkerHolder>(module, "Worker",
                                         "The serving side: it computes the requests of one data "
                                         "path at a time with the shards it holds.")
      .def(py::init(&make_worker), py::kw_only(), py::arg("name"), py::arg("spin_ns") = 0,
           py::arg("slowdown") = 1.0)
      .def("hold", &hold, py::arg("layer"), py::arg("shard"), py::arg("loan"),
           "Requests for (layer, shard) are computed with the loan, which the worker keeps. One "
           "thread calls this, and only while serve() does not run.")
      .def(
          "content",
          [](const ExpertWorker& self, uint32_t layer, uint32_t shard) -> std::optional<Content> {
            const auto held = self.held(LayerShard{layer, shard});
            if (held == nullptr) return std::nullopt;
            return content_of(*held);
          },
          py::arg("layer"), py::arg("shard"),
          "Returns what ResidentShard.content returns, or None where nothing is held.")
      .def("give_back", &ExpertWorker::give_back)
      .def(
          "start_pulse", [](ExpertWorker& self, int fd) { unwrap(self.start_pulse(OwnedFd(fd))); },
          py::arg("fd"), "It takes ownership of `fd`, or consumes `socket`.")
      .def(
          "start_pulse",
          [](ExpertWorker& self, SecureSocketBox& socket) {
            unwrap(self.start_pulse(socket.take()));
          },
          py::arg("socket"))
      .def("stop_pulse", &ExpertWorker::stop_pulse, py::call_guard<py::gil_scoped_release>())
      .def("serve", &serve, py::arg("channel"), py::arg("generation"),
           "It blocks without the GIL until the path ends.")
      .def("serve_inline", &serve_inline, py::arg("geometry"), py::arg("generation"),
           "Returns the host's end of a loopback. Whoever waits there for a reply computes it, one "
           "thread at a time.")
      .def("stop", &ExpertWorker::stop, py::arg("generation"),
           "It holds for this generation also when serve() has not begun yet.")
      .def("progress", &ExpertWorker::progress)
      .def("stats", &stats_dict);
}

}  // namespace dflash::bindings
