// A device step as Python holds it: the bridge between the client's data paths and the host's
// device, neither of which knows the other.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "base/checksum.h"
#include "bindings/arguments.h"
#include "bindings/boxes.h"
#include "bindings/client_box.h"
#include "client/step_watch.h"
#include "plugin/abi_records.h"
#include "transport/ring/ring_bell.h"
#include "wire/payload.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

constexpr size_t kMostMessages = 4096;  // of one step; the device refuses more

// Reads what a worker has answered instead of rows, from a private copy of its slot. Returns an
// empty text where that is no such answer.
std::string refusal_text(const client::LeasedPath& lane, uint32_t slot) {
  std::byte copy[wire::kFrameHeaderBytes + wire::kMaxErrorPayloadBytes];
  if (slot >= lane.geometry.num_slots || lane.geometry.reply_bytes < sizeof copy) return {};
  std::copy_n(lane.ring.peer + lane.ring.peer_slots + slot * lane.ring.peer_stride, sizeof copy,
              copy);
  const auto header = wire::decode_frame_header(
      std::span<const std::byte, wire::kFrameHeaderBytes>(copy, wire::kFrameHeaderBytes));
  if (!header.ok() || header.value().kind != wire::FrameKind::kError) return {};
  const std::span<const std::byte> payload(copy + wire::kFrameHeaderBytes,
                                           header.value().payload_bytes);
  const auto decoded = wire::decode_error(payload);
  return decoded.ok() && checksum(payload) == header.value().payload_checksum ? decoded.value().text
                                                                              : std::string();
}

class DeviceStep {
 public:
  DeviceStep(const HostDeviceBox& box, const ClientBox& client, const client::StepLease& lease,
             double timeout_s, const std::string& late, double budget_s,
             std::optional<uint64_t> stream, int64_t nap_ns)
      : device_(box.device), lanes_(lease.paths) {
    const int64_t limit_ns = timeout_ns("timeout_s", timeout_s);
    const std::shared_ptr<client::ExpertClient> watched = client.get();
    Status begun = [&]() -> Status {
      py::gil_scoped_release unlocked;
      return begin(lease.first_call, static_cast<int64_t>(budget_s * 1e9), stream);
    }();
    unwrap(std::move(begun));
    std::vector<transport::RingView> rings;
    for (const client::LeasedPath& lane : lanes_) rings.push_back(lane.ring);
    try {
      bell_ = std::make_unique<transport::RingBell>(std::move(rings), nap_ns);
      watch_ = std::make_unique<client::StepWatch>(watched, lease, limit_ns, late,
                                                   [this] { device_->step_abort(); });
    } catch (const std::system_error& error) {
      bell_.reset();
      static_cast<void>(finish());  // nothing was queued
      raise(Error{ErrorCode::kSystem,
                  std::string("a device step got no thread of the system: ") + error.what()});
    }
  }
  ~DeviceStep() { stop_watching(); }
  DeviceStep(const DeviceStep&) = delete;
  DeviceStep& operator=(const DeviceStep&) = delete;

  void add(uint32_t layer, const TokenBatchBox& box) {
    const TokenBatch& batch = box.batch;
    auto call = plugin::new_record<dflash_step_call>();
    call.layer = layer;
    call.hidden_states = batch.hidden_states;
    call.row_stride_bytes = static_cast<uint64_t>(batch.row_stride_bytes);
    call.topk_ids = batch.topk_ids;
    call.topk_weights = batch.topk_weights;
    call.output = batch.output;
    call.dtype = static_cast<uint32_t>(batch.dtype);
    call.weights_dtype = static_cast<uint32_t>(batch.weights_dtype);
    call.num_tokens = batch.num_tokens;
    call.top_k = batch.top_k;
    call.ids_are_64bit = batch.ids_are_64bit ? 1 : 0;
    unwrap(device_->step_add(call));
  }
  bool wait(double timeout_s) {
    Result<bool> waited = Error{ErrorCode::kClosed, ""};
    {
      py::gil_scoped_release unlocked;
      waited = device_->step_wait(static_cast<int64_t>(timeout_s * 1e9));
    }
    return unwrap(std::move(waited));
  }
  void abort() { device_->step_abort(); }
  void check() const {
    if (std::optional<Error> reason = watch_ ? watch_->reason() : reason_) raise(*reason);
  }
  void give_up() {
    py::gil_scoped_release unlocked;
    stop_watching();
    device_->step_give_up();
    bell_.reset();
  }
  // May be called again: an interrupt may come just when the step has ended.
  StepReport end() {
    if (report_) return *report_;
    Result<StepReport> ended = Error{ErrorCode::kClosed, ""};
    {
      py::gil_scoped_release unlocked;
      stop_watching();  // before the device's step ends, which is what it would abort
      ended = finish();
      bell_.reset();
    }
    report_ = unwrap(std::move(ended));
    return *report_;
  }

 private:
  void stop_watching() {
    if (watch_ == nullptr) return;
    reason_ = watch_->reason();
    watch_.reset();
  }
  Status begin(uint64_t first_call, int64_t budget_ns, std::optional<uint64_t> stream) {
    std::vector<std::byte*> bases;
    for (const client::LeasedPath& lane : lanes_)
      bases.insert(bases.end(), {lane.ring.own, lane.ring.peer});
    device_->keep_mapped(bases);
    std::vector<dflash_step_lane> mapped;
    auto step = plugin::new_record<dflash_step>();
    step.request_bytes = step.reply_bytes = ~uint64_t{63};
    for (const client::LeasedPath& lane : lanes_) {
      const transport::RingView& ring = lane.ring;
      auto own = device_->map_memory(ring.own, ring.own_bytes, false, ring.memory);
      if (!own.ok()) return std::move(own).error().with("worker " + lane.name + ", requests");
      auto peer =
          device_->map_memory(ring.peer, ring.peer_bytes, !ring.is_peer_writable, ring.memory);
      if (!peer.ok()) return std::move(peer).error().with("worker " + lane.name + ", replies");
      mapped.push_back({own.value(), peer.value(), lane.generation, ring.own_slots, ring.own_stride,
                        ring.peer_slots, ring.peer_stride, ring.entry_mask, ring.head, ring.tail,
                        0});
      step.request_bytes = std::min(step.request_bytes, lane.geometry.request_bytes);
      step.reply_bytes = std::min(step.reply_bytes, lane.geometry.reply_bytes);
      step.request_dtype = static_cast<uint32_t>(lane.request_dtype);
      step.reply_dtype = static_cast<uint32_t>(lane.reply_dtype);
    }
    step.num_lanes = static_cast<uint32_t>(mapped.size());
    step.lanes = mapped.data();
    step.first_call = first_call;
    step.budget_ns = budget_ns;
    step.stream = stream.value_or(0);
    step.has_stream = stream ? 1 : 0;
    return device_->step_begin(step);
  }

  Result<StepReport> finish() {
    std::vector<dflash_step_lane> lanes(lanes_.size());
    std::vector<dflash_step_message> messages(kMostMessages);
    auto outcome = plugin::new_record<dflash_step_outcome>();
    outcome.lanes = lanes.data();
    outcome.messages = messages.data();
    outcome.max_messages = static_cast<uint32_t>(messages.size());
    DFLASH_TRY(device_->step_end(outcome));
    StepReport report;
    report.code = outcome.code;
    report.layer = outcome.layer;
    report.detail = outcome.detail;
    report.result.has_failed = outcome.code != 0;
    for (const dflash_step_lane& lane : lanes) report.result.used.push_back({lane.head, lane.tail});
    for (uint32_t i = 0; i < outcome.num_messages; ++i) {
      const dflash_step_message& one = messages[i];
      report.result.answered.push_back({lanes_[one.lane].worker, one.layer, one.num_rows,
                                        one.num_pairs, one.request_bytes, one.reply_bytes});
    }
    if (outcome.code == 0 || outcome.lane >= lanes_.size()) return report;
    report.worker = lanes_[outcome.lane].name;
    if (outcome.code == static_cast<int32_t>(ErrorCode::kWorkerFailed))
      report.text = refusal_text(lanes_[outcome.lane], outcome.slot);
    return report;
  }

  std::shared_ptr<plugin::HostDevice> device_;
  std::vector<client::LeasedPath> lanes_;
  std::unique_ptr<transport::RingBell> bell_;
  std::unique_ptr<client::StepWatch> watch_;
  std::optional<Error> reason_;  // why it stopped the step, once it is gone
  std::optional<StepReport> report_;
};

// A shard as Client.define_layer takes it: its id, its worker, its weights' fingerprint and its
// experts in the order of their local ids. Here the worker is named by its place in
// StepLease.workers, which is the lane of the step.
using ShardTuple = std::tuple<uint32_t, uint32_t, uint64_t, std::vector<uint32_t>>;

void define_step_layer(const HostDeviceBox& box, uint32_t layer, uint32_t in_size,
                       uint32_t out_size, uint32_t num_experts,
                       const std::vector<ShardTuple>& shards) {
  std::vector<dflash_step_shard> places;
  std::vector<uint32_t> experts(num_experts, ~0u);
  for (const auto& [shard, path, fingerprint, ids] : shards) {
    const uint32_t lane = path, place = static_cast<uint32_t>(places.size());
    const auto slot =
        std::count_if(places.begin(), places.end(),
                      [lane](const dflash_step_shard& one) { return one.lane == lane; });
    places.push_back({fingerprint, shard, lane, static_cast<uint32_t>(slot), 0});
    for (uint32_t local = 0; local < ids.size(); ++local) {
      if (ids[local] < num_experts) experts[ids[local]] = place << 16 | local;
    }
  }
  auto plan = plugin::new_record<dflash_step_layer>();
  plan.layer = layer;
  plan.in_size = in_size;
  plan.out_size = out_size;
  plan.num_shards = static_cast<uint32_t>(places.size());
  plan.num_experts = num_experts;
  plan.shards = places.data();
  plan.experts = experts.data();
  unwrap(box.device->step_layer(plan));
}

}  // namespace

void bind_device_step(py::module_& module) {
  py::class_<DeviceStep>(module, "DeviceStep",
                         "Exchanges on the host's device, without the host's processor in between. "
                         "One thread uses it, but any may call `abort`.")
      .def(py::init<const HostDeviceBox&, const ClientBox&, const client::StepLease&, double,
                    const std::string&, double, std::optional<uint64_t>, int64_t>(),
           py::arg("device"), py::arg("client"), py::arg("lease"), py::kw_only(),
           py::arg("timeout_s"), py::arg("late"), py::arg("budget_s"),
           py::arg("stream") = std::nullopt, py::arg("nap_ns") = 0,
           "The step is given up as soon as one of its workers is lost, or `timeout_s` have "
           "passed, which `late` says then. The kernels give up by themselves after `budget_s`. "
           "UnsupportedError is for a device that cannot use the memory of the data paths, "
           "DflashError for a lack of threads.")
      .def_static(
          "define_layer", &define_step_layer, py::arg("device"), py::kw_only(), py::arg("layer"),
          py::arg("in_size"), py::arg("out_size"), py::arg("num_experts"), py::arg("shards"),
          "It may be called again.\n\nshards: Those that Client.define_layer takes, in ascending "
          "order of their ids, each with a place in StepLease.workers instead of its worker.")
      .def("add", &DeviceStep::add, py::arg("layer"), py::arg("batch"),
           "Queues a call on the stream. The addresses of the batch are the device's.")
      .def("wait", &DeviceStep::wait, py::arg("timeout_s"))
      .def("abort", &DeviceStep::abort)
      .def("check", &DeviceStep::check,
           "Raises WorkerLost or WorkerTimeout where the step was given up.")
      .def("give_up", &DeviceStep::give_up)
      .def("end", &DeviceStep::end, "May be called again and returns the same then.");
}

}  // namespace dflash::bindings
