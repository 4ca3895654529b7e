// Binds the host's client: workers and layers, what happens between calls, and reports.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/client_box.h"
#include "bindings/typed.h"
#include "client/engine.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

// Resumes the client at the end of its scope in every case but success.
class ResumeOnError {
 public:
  explicit ResumeOnError(ExpertClient& client) : client_(client) {}
  ResumeOnError(const ResumeOnError&) = delete;
  ResumeOnError& operator=(const ResumeOnError&) = delete;
  ~ResumeOnError() {
    if (is_kept) return;
    py::gil_scoped_release unlocked;
    client_.resume();
  }
  bool is_kept = false;

 private:
  ExpertClient& client_;
};

[[noreturn]] void raise_late(const std::string& what) { raise(Error{ErrorCode::kTimeout, what}); }

void hold(ExpertClient& client, Deadline deadline) {
  if (!repeat_until(deadline, [&](Deadline tick) { return client.hold(tick); })) {
    raise_late("a device step or a change of mode in another thread did not end in time");
  }
}

// Holds the client and waits until no call is under way. Raises WorkerTimeout.
void hold_quiet(ExpertClient& client, double timeout_s) {
  const Deadline deadline = deadline_of(timeout_s);
  hold(client, deadline);
  ResumeOnError guard(client);
  if (!repeat_until(deadline, [&](Deadline tick) { return client.wait_until_quiet(tick); })) {
    raise_late(
        "calls are still under way after their deadline; collect or drop submitted calls first");
  }
  guard.is_kept = true;
}

client::StepLease begin_step(const ClientBox& box, uint32_t num_calls, double timeout_s) {
  const std::shared_ptr<ExpertClient> client = box.get();
  const Deadline deadline = deadline_of(timeout_s);
  hold(*client, deadline);
  ResumeOnError guard(*client);
  if (!repeat_until(deadline, [&](Deadline tick) { return client->wait_until_fit(tick); })) {
    raise_late(
        "calls did not end, or workers got no fresh data paths, in time for a device step; collect "
        "or drop submitted calls first");
  }
  Result<client::StepLease> lease = [&] {
    py::gil_scoped_release unlocked;
    return client->begin_step(num_calls);
  }();
  auto begun = unwrap(std::move(lease));
  guard.is_kept = true;
  return begun;
}

void end_step(const ClientBox& box, const std::optional<StepReport>& report) {
  const client::StepResult result = report ? report->result : client::StepResult();
  without_gil(box, [&](ExpertClient& client) {
    client.end_step(result);
    client.resume();
  });
}

uint32_t add_worker(const ClientBox& box, const std::string& name, ChannelBox& channel,
                    uint64_t generation, int pulse_fd, uint32_t slice_tokens, uint32_t window,
                    const std::string& request_dtype, const std::string& reply_dtype,
                    bool is_measured, bool is_last_resort) {
  client::NewWorker worker;
  worker.pulse = OwnedFd(pulse_fd);
  worker.name = name;
  worker.path = {channel.take(), generation};
  worker.policy = {slice_tokens, window, is_measured};
  worker.request_dtype = parse_dtype(request_dtype);
  worker.reply_dtype = parse_dtype(reply_dtype);
  worker.is_last_resort = is_last_resort;
  return unwrap(
      without_gil(box, [&](ExpertClient& client) { return client.add_worker(std::move(worker)); }));
}

using ShardTuple = std::tuple<uint32_t, uint32_t, uint64_t, std::vector<uint32_t>>;

void define_layer(const ClientBox& box, uint32_t layer, const std::string& name, uint32_t in_size,
                  uint32_t out_size, uint32_t num_experts, const std::vector<ShardTuple>& shards,
                  uint32_t cost_class) {
  client::LayerPlan plan{layer, name, in_size, out_size, num_experts, {}, cost_class};
  for (const auto& [shard, worker, fingerprint, experts] : shards) {
    plan.shards.push_back(client::ShardPlace{shard, worker, fingerprint, experts});
  }
  unwrap(without_gil(box, [&](ExpertClient& client) { return client.define_layer(plan); }));
}

// A duration that may be 0, unlike a timeout.
int64_t duration_ns(const char* name, double seconds) {
  if (seconds == 0) return 0;
  return timeout_ns(name, seconds);
}

std::shared_ptr<ClientBox> make_client(int64_t spin_ns, double call_timeout_s,
                                       double stall_timeout_s, uint32_t max_calls, double suspect_s,
                                       double park_s, double reconnect_grace_s,
                                       double hedge_share) {
  client::ClientOptions options(timeout_ns("call_timeout_s", call_timeout_s),
                                timeout_ns("stall_timeout_s", stall_timeout_s));
  options.spin_ns = spin_ns;
  options.max_calls = max_calls;
  options.suspect_ns = timeout_ns("suspect_s", suspect_s);
  options.park_ns = duration_ns("park_s", park_s);
  options.reconnect_grace_ns = duration_ns("reconnect_grace_s", reconnect_grace_s);
  if (!(hedge_share >= 0 && hedge_share <= 1)) {
    raise(Error{ErrorCode::kInvalidArgument,
                "hedge_share is " + std::to_string(hedge_share) + "; allowed are 0..1"});
  }
  options.hedge_share = hedge_share;
  auto box = std::make_shared<ClientBox>(options);
  if (box->get()->worn_fd() < 0 || box->get()->event_fd() < 0) {
    raise(Error{ErrorCode::kSystem, std::string("cannot open an eventfd for a client: ") +
                                        std::strerror(errno) + "; raise the limit (ulimit -n)"});
  }
  return box;
}

using ClientClass = py::class_<ClientBox, std::shared_ptr<ClientBox>>;

void bind_setting_up(ClientClass& client) {
  client
      .def(py::init(&make_client), py::kw_only(), py::arg("spin_ns"), py::arg("call_timeout_s"),
           py::arg("stall_timeout_s"), py::arg("max_calls") = client::kMaxCalls,
           py::arg("suspect_s") = 0.3, py::arg("park_s") = 2.0, py::arg("reconnect_grace_s") = 0.05,
           py::arg("hedge_share") = 0.05,
           "suspect_s: What a worker owes that shows no progress for so long is asked of another "
           "holder too.\npark_s: A slice without a usable holder waits so long for one that is on "
           "its way back, and so long of that before a last resort gets it.\nhedge_share: Second "
           "requests for slices that are merely slow, per slice that arrives; 0 sends none.")
      .def("close", &ClientBox::close,
           "Every later use is a ConfigError. Threads that are inside end by themselves.")
      .def("add_worker", &add_worker, py::kw_only(), py::arg("name"), py::arg("channel"),
           py::arg("generation"), py::arg("pulse_fd"), py::arg("slice_tokens"), py::arg("window"),
           py::arg("request_dtype"), py::arg("reply_dtype"), py::arg("is_measured") = false,
           py::arg("is_last_resort") = false,
           "is_last_resort: It is asked only where no other holder can be.")
      .def("define_layer", &define_layer, py::kw_only(), py::arg("layer"), py::arg("name"),
           py::arg("in_size"), py::arg("out_size"), py::arg("num_experts"), py::arg("shards"),
           py::arg("cost_class") = 0,
           "shards: Each shard is (shard id, worker, weights fingerprint, ascending expert "
           "ids).\ncost_class: Layers of equal class share a cost curve.")
      .def(
          "set_policy",
          [](const ClientBox& box, uint32_t worker, uint32_t slice_tokens, uint32_t window,
             bool is_measured) {
            unwrap(without_gil(box, [&](ExpertClient& one) {
              return one.set_policy(worker, {slice_tokens, window, is_measured});
            }));
          },
          py::arg("worker"), py::arg("slice_tokens"), py::arg("window"),
          py::arg("is_measured") = false,
          "Where `is_measured`, both numbers are upper bounds and the worker's model chooses.")
      .def(
          "set_dtypes",
          [](const ClientBox& box, uint32_t worker, const std::string& request_dtype,
             const std::string& reply_dtype) {
            const Dtype request = parse_dtype(request_dtype), reply = parse_dtype(reply_dtype);
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.set_dtypes(worker, request, reply); }));
          },
          py::arg("worker"), py::arg("request_dtype"), py::arg("reply_dtype"))
      .def(
          "mark_lost",
          [](const ClientBox& box, uint32_t worker, const std::string& reason) {
            without_gil(box, [&](ExpertClient& one) { one.mark_lost(worker, reason); });
          },
          py::arg("worker"), py::arg("reason"));
}

const char* event_name(client::EventKind kind) {
  switch (kind) {
    case client::EventKind::kSuspect: return "suspect";
    case client::EventKind::kWell:    return "well";
    case client::EventKind::kLost:    return "lost";
    case client::EventKind::kIdle:    return "idle";
  }
  return "unknown";
}

void bind_holders(ClientClass& client) {
  client
      .def(
          "set_holders",
          [](const ClientBox& box, uint32_t layer, uint32_t shard,
             const std::vector<uint32_t>& workers) {
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.set_holders(layer, shard, workers); }));
          },
          py::arg("layer"), py::arg("shard"), py::arg("workers"),
          "The workers that hold a shard, preferred first; whoever calls this knows that they "
          "compute the same bits. ConfigError names layer and shard.")
      .def(
          "set_draining",
          [](const ClientBox& box, uint32_t worker, bool is_draining) {
            const auto admission =
                is_draining ? client::Admission::kDraining : client::Admission::kOpen;
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.set_admission(worker, admission); }));
          },
          py::arg("worker"), py::arg("is_draining"),
          "A worker that drains gets no new slices where another holder can have them.")
      .def(
          "set_remedy",
          [](const ClientBox& box, uint32_t worker, bool has_remedy) {
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.set_remedy(worker, has_remedy); }));
          },
          py::arg("worker"), py::arg("has_remedy"),
          "Whether somebody brings the worker back if it is lost, so that calls wait for that.")
      .def(
          "set_stand_in",
          [](const ClientBox& box, uint32_t worker, bool may_come) {
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.set_stand_in(worker, may_come); }));
          },
          py::arg("worker"), py::arg("may_come"),
          "Whether another holder will be named once the worker is suspected, for which a call "
          "waits beyond its deadline.")
      .def(
          "revive",
          [](const ClientBox& box, uint32_t worker, ChannelBox& channel, uint64_t generation,
             int pulse_fd) {
            OwnedFd pulse(pulse_fd);
            client::NewPath path{channel.take(), generation};
            unwrap(without_gil(box, [&](ExpertClient& one) {
              return one.replace_worker(worker, std::move(path), std::move(pulse));
            }));
          },
          py::arg("worker"), py::arg("channel"), py::arg("generation"), py::arg("pulse_fd"),
          "Takes a lost worker back, which another process may serve now. It takes the pulse "
          "descriptor in every case. ConfigError where the worker is not lost or the generation is "
          "the former one.")
      .def(
          "event_fd", [](const ClientBox& box) { return box.get()->event_fd(); },
          "The descriptor is readable while events wait. It stays the client's own.")
      .def(
          "take_events",
          [](const ClientBox& box) {
            py::typing::List<Fields> all;
            for (const client::ClientEvent& event :
                 without_gil(box, [](ExpertClient& one) { return one.take_events(); })) {
              Fields fields;
              fields["worker"] = event.worker;
              fields["kind"] = event_name(event.kind);
              fields["reason"] = event.reason;
              all.append(fields);
            }
            return all;
          },
          "Each is worker, kind (suspect, well, lost, idle) and reason, in the order of what "
          "happened.");
}

void bind_between_calls(ClientClass& client) {
  client
      .def(
          "hold", [](const ClientBox& box, double timeout_s) { hold_quiet(*box.get(), timeout_s); },
          py::arg("timeout_s"),
          "Parks new calls and returns once none is under way; they go on at resume(). "
          "WorkerTimeout.")
      .def("resume",
           [](const ClientBox& box) { without_gil(box, [](ExpertClient& one) { one.resume(); }); })
      .def(
          "worn_fd", [](const ClientBox& box) { return box.get()->worn_fd(); },
          "The descriptor is readable while a data path waits to be renewed, and after "
          "wake_renewer(). It stays the client's own.")
      .def("wake_renewer",
           [](const ClientBox& box) {
             without_gil(box, [](ExpertClient& one) { one.wake_renewer(); });
           })
      .def(
          "retire_worn_paths",
          [](const ClientBox& box) {
            py::typing::List<py::typing::Tuple<py::int_, py::str>> all;
            for (const client::WornPath& path :
                 without_gil(box, [](ExpertClient& one) { return one.retire_worn_paths(); })) {
              all.append(py::make_tuple(path.worker, path.reason));
            }
            return all;
          },
          "Returns (worker, reason) for each path; the caller renews them.")
      .def(
          "pulse_age_s",
          [](const ClientBox& box, uint32_t worker) {
            const int64_t age_ns = unwrap(
                without_gil(box, [&](ExpertClient& one) { return one.pulse_age_ns(worker); }));
            return static_cast<double>(age_ns) / 1e9;
          },
          py::arg("worker"),
          "Reads the pulses of a worker, and returns how long ago the last one was read.")
      .def(
          "retire_path",
          [](const ClientBox& box, uint32_t worker, const std::string& reason) {
            unwrap(without_gil(box,
                               [&](ExpertClient& one) { return one.retire_path(worker, reason); }));
          },
          py::arg("worker"), py::arg("reason"),
          "This and `renew_path` raise WorkerLost, and ConfigError where something is in flight on "
          "the path.")
      .def(
          "renew_path",
          [](const ClientBox& box, uint32_t worker, ChannelBox& channel, uint64_t generation) {
            client::NewPath path{channel.take(), generation};
            unwrap(without_gil(
                box, [&](ExpertClient& one) { return one.renew_path(worker, std::move(path)); }));
          },
          py::arg("worker"), py::arg("channel"), py::arg("generation"))
      .def("begin_step", &begin_step, py::arg("num_calls"), py::arg("timeout_s"),
           "Holds the client and hands over the data paths of one holder for each shard. "
           "WorkerTimeout, WorkerLost; UnsupportedError names a worker that is not reached in "
           "shared memory, or has too few slots.")
      .def("end_step", &end_step, py::arg("report"),
           "Resumes calls. Without a report it is not known how far the step came, and none of its "
           "paths is used again.");
}

void bind_reports(ClientClass& client) {
  client
      .def(
          "counters",
          [](const ClientBox& box) {
            return counters_dict(
                without_gil(box, [](ExpertClient& one) { return one.counters(); }));
          },
          "The counters by (worker, layer).")
      .def("workers",
           [](const ClientBox& box) {
             return worker_dicts(without_gil(box, [](ExpertClient& one) { return one.workers(); }));
           })
      .def(
          "forecasts",
          [](const ClientBox& box) {
            return forecast_dicts(
                without_gil(box, [](ExpertClient& one) { return one.forecasts(); }));
          },
          "For each worker its cost curves, and the chunks that were chosen, predicted and "
          "measured.")
      .def(
          "set_spinning",
          [](const ClientBox& box, bool is_allowed) {
            without_gil(box, [is_allowed](ExpertClient& one) { one.set_spinning(is_allowed); });
          },
          py::arg("is_allowed"),
          "Whether waits may spin, where the client was made with time to spin.")
      .def(
          "set_profile",
          [](const ClientBox& box, bool on) {
            without_gil(box, [on](ExpertClient& one) { one.set_profile(on); });
          },
          py::arg("on"))
      .def("take_traces", [](const ClientBox& box) {
        return trace_dicts(without_gil(box, [](ExpertClient& one) { return one.take_traces(); }));
      });
}

}  // namespace

int64_t timeout_ns(const char* name, double seconds) {
  if (seconds > 0 && seconds <= kMaxWaitS) return static_cast<int64_t>(seconds * 1e9);
  raise(Error{ErrorCode::kInvalidArgument,
              std::string(name) + " is " + std::to_string(seconds) +
                  "; allowed are more than 0 and at most 1000000 seconds"});
}

Deadline deadline_of(double seconds) {
  const double bounded = seconds > 0 ? (seconds < kMaxWaitS ? seconds : kMaxWaitS) : 0;
  return Deadline::after_ns(static_cast<int64_t>(bounded * 1e9));
}

void bind_client(py::module_& module) {
  // After so many times call_timeout_s every call has ended.
  module.attr("MAX_PATIENCE") = client::kMaxPatience;
  py::class_<client::StepLease>(
      module, "StepLease",
      "The data paths of a client that it has handed over to a device step: those of `workers`, by "
      "index. `holders` names for each layer who answers for its shards, as places in `workers`; "
      "leases with the same `holders_id` have equal `holders`.")
      .def_readonly("holders_id", &client::StepLease::holders_id)
      .def_property_readonly("workers",
                             [](const client::StepLease& lease) {
                               std::vector<uint32_t> workers;
                               for (const auto& path : lease.paths) workers.push_back(path.worker);
                               return workers;
                             })
      .def_property_readonly("holders", [](const client::StepLease& lease) {
        std::map<uint32_t, std::vector<uint32_t>> holders;
        for (const auto& one : lease.holders) holders[one.layer] = one.paths;
        return holders;
      });
  py::class_<StepReport>(
      module, "StepReport",
      "How a device step went. `code` is one of `error_codes()`, or 0 without failure. `layer` and "
      "`worker` say where it failed, `detail` is the token or the device's reason, and `text` "
      "holds the words of a worker that refused.")
      .def_readonly("code", &StepReport::code)
      .def_readonly("layer", &StepReport::layer)
      .def_readonly("detail", &StepReport::detail)
      .def_readonly("worker", &StepReport::worker)
      .def_readonly("text", &StepReport::text);
  ClientClass client(module, "Client",
                     "The host's side of the exchange with all workers. Any thread may call; which "
                     "worker is meant is said by the number that `add_worker` returned.");
  bind_setting_up(client);
  client.def(
      "run", &run_call, py::arg("layer"), py::arg("batch"),
      "Submits a call, waits for it and raises its error: the hot path crosses into C++ once.");
  bind_holders(client);
  bind_between_calls(client);
  bind_reports(client);
}

}  // namespace dflash::bindings
