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

#include "base/clock.h"
#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/typed.h"
#include "bindings/weight_sources.h"
#include "compute/cpu/cpu_backend.h"
#include "store/direct_file.h"
#include "store/lowest_priority.h"
#include "store/mapped_file.h"
#include "store/scrubber.h"
#include "store/shard_store.h"
#include "transport/loopback/loopback.h"
#include "worker/expert_worker.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using store::DirectFile;
using store::MappedFile;
using store::ResidentShard;
using store::ShardStore;
using worker::ExpertWorker;
using worker::LayerShard;

// Whoever computes rows beside calls waits so long for a turn. A call of 4,096 rows takes seconds,
// and eight hosts may have one each before it.
constexpr int64_t kTurnNs = 60'000'000'000;

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

// Maps an expert from a file of panels; the shard keeps the file.
void map_expert(const LoanBox& self, uint32_t local_expert_id,
                const std::shared_ptr<MappedFile>& file, uint64_t offset, uint64_t content_checksum,
                uint32_t panels_sum) {
  const auto& box = py::cast<const StoreBox&>(self.store);
  const std::shared_ptr<ResidentShard> shard = self.get();
  Status status = ok();
  {
    py::gil_scoped_release unlocked;
    status =
        box.store->map_expert(shard, local_expert_id, file, offset, content_checksum, panels_sum);
  }
  unwrap(std::move(status));
}

void slot_expert(const LoanBox& self, uint32_t local_expert_id,
                 const std::shared_ptr<DirectFile>& file, uint64_t offset,
                 uint64_t content_checksum, uint32_t panels_sum) {
  unwrap(self.get()->slot_expert(local_expert_id, file, offset, content_checksum, panels_sum));
}

Counts slots_dict(const StoreBox& self) {
  Counts fields;
  if (self.store->slots() == nullptr) return fields;
  const store::SlotStats stats = self.store->slots()->stats();
  fields["hits"] = stats.hits;
  fields["misses"] = stats.misses;
  fields["read_bytes"] = stats.read_bytes;
  fields["slots"] = stats.num_slots;
  fields["readers"] = stats.num_readers;
  return fields;
}

void tell(Counts& fields, const store::BatchCounts& counts) {
  fields["batches"] = counts.batches;
  fields["batch_rows"] = counts.rows;
  fields["batch_sessions"] = counts.sessions;
}

Counts batches_dict(const StoreBox& self) {
  Counts fields;
  tell(fields, self.store->batch_counts());
  return fields;
}

// (version, panel width, order, format of gate and up, format of down, bytes of panels, of biases)
using FormFields =
    std::tuple<uint32_t, uint32_t, std::string, std::string, std::string, uint64_t, uint64_t>;

std::optional<FormFields> panel_form(const LoanBox& self) {
  const auto form = self.get()->panel_form();
  if (!form) return std::nullopt;
  return FormFields{compute::kPanelsVersion,
                    form->panel_width,
                    form->has_bf16_pairs ? "bf16_pairs" : "plain",
                    compute::format_name(form->formats.gate_up),
                    compute::format_name(form->formats.down),
                    form->panel_bytes,
                    form->bias_bytes};
}

// The pieces of an expert in memory, its content checksum and the sum of the pieces.
using PackedFields = std::tuple<std::vector<py::memoryview>, uint64_t, uint32_t>;

PackedFields packed_expert(const LoanBox& self, uint32_t local_expert_id) {
  const std::shared_ptr<ResidentShard> shard = self.get();
  if (local_expert_id >= shard->facts().num_local_experts)
    raise(Error{ErrorCode::kInvalidArgument, "no such local expert"});
  const ResidentShard::Packed packed = shard->packed(local_expert_id);
  std::vector<py::memoryview> pieces;
  for (const auto& piece : packed.pieces) {
    if (!piece.empty())
      pieces.push_back(
          py::memoryview::from_memory(piece.data(), static_cast<py::ssize_t>(piece.size())));
  }
  return {std::move(pieces), packed.content_checksum, packed.panels_sum};
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
    store::ComputeTurns::Turn turn(shard->turns());
    const Deadline deadline = Deadline::after_ns(kTurnNs);
    status = turn.await(progress, [&] { return deadline.has_passed(); }) ==
                     store::ComputeTurns::Outcome::kTurn
                 ? shard->forward(args, progress)
                 : Status(Error{ErrorCode::kTimeout, "compute_rows: others computed for " +
                                                         std::to_string(kTurnNs / 1'000'000'000) +
                                                         " s"});
  }
  unwrap(std::move(status));
  return {reinterpret_cast<const char*>(reply.data()), reply.size()};
}

void check_period(double period_s) {
  if (!(period_s >= 0.0 && period_s <= 1e9))
    raise(Error{ErrorCode::kInvalidArgument, "period_s is not 0 or above"});
}

std::unique_ptr<store::Scrubber> make_scrubber(const StoreBox& store, double period_s) {
  check_period(period_s);
  return std::make_unique<store::Scrubber>(store.store, period_s);
}

// Returns (number of the shard, local expert), or nothing once the scrubber was stopped.
std::optional<std::pair<uint64_t, uint32_t>> next_damage(store::Scrubber& self) {
  std::optional<store::Damage> damage;
  {
    py::gil_scoped_release unlocked;
    damage = self.run();
  }
  if (!damage) return std::nullopt;
  return std::pair{damage->shard_number, damage->local_expert_id};
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
                                     const HostPoolBox* pool, uint64_t slots_bytes,
                                     uint64_t first_number) {
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
      {new ShardStore(std::move(backend), memory_limit, slots_bytes, first_number),
       DeleteInOwnProcess()},
      layout == compute::WeightsLayout::kMapped
  });
}

LoanBox borrow(const py::object& self, const Fields& spec, uint32_t num_local_experts,
               const std::string& weight_dtype, uint64_t weights_fingerprint,
               const std::string& numerics, std::optional<uint64_t> free_bytes) {
  const store::ShardFacts facts{.spec = parse_ffn_spec(spec),
                                .num_local_experts = num_local_experts,
                                .formats = unwrap(compute::parse_resident_formats(weight_dtype)),
                                .numerics = unwrap(compute::parse_numerics(numerics)),
                                .weights_fingerprint = weights_fingerprint};
  ShardStore& store = *py::cast<const StoreBox&>(self).store;
  Result<std::shared_ptr<ResidentShard>> lent = Error{ErrorCode::kClosed, ""};
  {
    py::gil_scoped_release unlocked;
    lent = store.borrow(facts, free_bytes);
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
  tell(fields, stats.own);
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
      .def_static(
          "of_descriptor",
          [](int descriptor, const std::string& path) {
            return std::shared_ptr<MappedFile>(
                unwrap(MappedFile::of_descriptor(OwnedFd(descriptor), path)));
          },
          py::arg("descriptor"), py::arg("path"),
          "Takes the descriptor, and closes it with the object. `path` is what errors call the "
          "file.")
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
      .def(
          "state",
          [](const MappedFile& self) {
            const MappedFile::Identity found = unwrap(self.identity());
            return std::tuple(found.device, found.inode, found.size, found.modified_ns,
                              found.changed_ns);
          },
          "What tells this file from another, and its state now from a later one: (device, inode, "
          "bytes, and when contents and entry were changed last, in nanoseconds since 1970).")
      .def("drop_pages", &MappedFile::drop_pages,
           "Resident pages of the file leave this process, by madvise(MADV_DONTNEED).");
  py::class_<DirectFile, std::shared_ptr<DirectFile>>(
      module, "DirectFile", "A file that is read into slots, past the page cache where possible.")
      .def(py::init([](int descriptor, const std::string& path) {
             return std::shared_ptr<DirectFile>(
                 unwrap(DirectFile::of_descriptor(OwnedFd(descriptor), path)));
           }),
           py::arg("descriptor"), py::arg("path"),
           "Takes the descriptor, and closes it with the object.");
}

void bind_shards(py::module_& module) {
  module.def("take_lowest_priority", &store::take_lowest_priority,
             "The calling thread yields to all others from now on, on the processor and at the "
             "disk, where the system allows that.");
  // Before whatever names it, because signatures are written when a function is bound.
  py::class_<LoanBox> loan(module, "ResidentShard",
                           "The loan of a shard. A shard that others use is complete; a new one is "
                           "loaded by the borrower.");
  py::class_<StoreBox>(module, "ShardStore",
                       "The shards that this process has resident. Any thread may borrow.")
      .def(py::init(&make_store), py::kw_only(), py::arg("isa"), py::arg("num_threads"),
           py::arg("cpus") = std::vector<int>{}, py::arg("device") = nullptr,
           py::arg("weights_layout") = "packed", py::arg("memory_limit") = 0,
           py::arg("pool") = nullptr, py::arg("slots_bytes") = 0, py::arg("first_number") = 1,
           "device: This device computes instead of the kernels of `isa`.\nweights_layout: With "
           "\"mapped\" it computes from the files, which it keeps open.\nmemory_limit: The weights "
           "may take so many bytes; 0 sets no limit.\npool: These threads compute instead of "
           "threads of its own.\nslots_bytes: Experts are read into so many bytes of memory as "
           "calls need them (ResidentShard.slot_expert); 0: they stay where they were "
           "loaded.\nfirst_number: That of the first shard.")
      .def(
          "borrow", &borrow, py::arg("spec"), py::arg("num_local_experts"), py::arg("weight_dtype"),
          py::arg("weights_fingerprint"),
          py::arg("numerics") = compute::numerics_name(compute::kDefaultNumerics),
          py::arg("free_bytes") = py::none(),
          "ConfigError is raised where there is no room for the shard, or somebody else is loading "
          "it.\n\nfree_bytes: So much of the memory in which it will lie is free; with None only "
          "the memory limit counts. Shards that nobody borrows are freed for it, the oldest "
          "first.\nspec: The keys are those of FfnSpec, enums go by their lower-case "
          "names (\"silu\", \"gated\", \"clamped_swiglu\"), and what is missing has its default.")
      .def(
          "drop_unborrowed",
          [](const StoreBox& self, double kept_s) {
            return static_cast<double>(
                       self.store->drop_unborrowed(static_cast<int64_t>(kept_s * 1e9))) /
                   1e9;
          },
          py::arg("kept_s") = 0.0,
          "Frees the shards that nobody has borrowed for so many seconds, and returns in how many "
          "the next one will have been, 0 where there is none.")
      .def("drop_failed", [](const StoreBox& self) { self.store->drop_failed(); })
      .def("resident_bytes", [](const StoreBox& self) { return self.store->resident_bytes(); })
      .def("num_shards", [](const StoreBox& self) { return self.store->num_shards(); })
      .def("batches", &batches_dict,
           "What its sessions have computed together: batches, batch_rows (of all) and "
           "batch_sessions (summed over the batches).")
      .def("slots", &slots_dict,
           "What slots have done so far: hits and misses of calls' experts, read_bytes, and their "
           "number, slots, and that of threads that read, readers; empty where there are none.");
  loan.def_property_readonly("is_complete",
                             [](const LoanBox& self) { return self.get()->is_complete(); })
      .def_property_readonly(
          "number", [](const LoanBox& self) { return self.get()->number(); },
          "What tells the shard from all others that its store has had.")
      .def_property_readonly(
          "is_shared", [](const LoanBox& self) { return self.get()->is_shared(); },
          "Whether somebody else borrows it too.")
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
      .def("map_expert", &map_expert, py::arg("local_expert_id"), py::arg("file"),
           py::arg("offset"), py::kw_only(), py::arg("content_checksum"), py::arg("panels_sum"),
           "Takes an expert's panels from a file of them instead of packing them, or instead of "
           "the memory in which they were packed, which is given back. Any threads may map "
           "different experts. CheckpointError where the file is too short, ConfigError where the "
           "loaded expert is another one.")
      .def("slot_expert", &slot_expert, py::arg("local_expert_id"), py::arg("file"),
           py::arg("offset"), py::kw_only(), py::arg("content_checksum"), py::arg("panels_sum"),
           "Says where an expert lies that is read whenever a call needs it and no slot has it. "
           "ConfigError where slots hold fewer experts than this shard has, CheckpointError where "
           "the file is too short, UnsupportedError without slots.")
      .def_property_readonly(
          "panel_form", &panel_form,
          "How experts lie in files of panels: (version, panel width, order, format of gate and "
          "up, format of down, bytes of an expert's panels, of its biases); None where this shard "
          "takes none.")
      .def("packed_expert", &packed_expert, py::arg("local_expert_id"),
           "Returns the memory of an expert's panels and biases, which is valid while this loan "
           "lasts and nobody maps the expert, its content checksum and the sum of that memory. No "
           "pieces where it is not in memory whole.")
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
           "A pass over all of them takes `period_s` seconds; with 0 there is none, and what "
           "calls find is handed on.")
      .def(
          "next_damage", &next_damage,
          "Blocks without the GIL until an expert is found changed, and returns "
          "(number of the shard, local expert), or None once it was stopped. One thread at a time.")
      .def(
          "set_period",
          [](store::Scrubber& self, double period_s) {
            check_period(period_s);
            self.set_period(period_s);
          },
          py::arg("period_s"))
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
