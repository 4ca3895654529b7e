// The host's client. `run` is the hot path of every MoE layer: one crossing, the GIL released while
// waiting.
// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "bindings/arguments.h"
#include "bindings/client_reports.h"
#include "bindings/module.h"
#include "bindings/step_lease.h"
#include "client/expert_client.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

using client::ExpertClient;

constexpr int64_t kSignalPeriodNs = 20'000'000;  // how late Ctrl-C may be seen inside a wait
// above any sensible timeout, far below overflow in nanoseconds
constexpr double kMaxWaitS = 1e6;

// The client and the process it belongs to: sockets and mappings are shared with a forked child,
// whose use would corrupt both.
class ClientBox {
 public:
  explicit ClientBox(const client::ClientOptions& options)
      : client_(std::make_unique<ExpertClient>(options)), owner_(::getpid()) {}
  ClientBox(const ClientBox&) = delete;
  ClientBox& operator=(const ClientBox&) = delete;
  ~ClientBox() {
    // closing would hang up the parent's connections
    if (!is_ours()) static_cast<void>(client_.release());
  }

  ExpertClient& get() {
    if (!is_ours()) {
      raise(
          Error{ErrorCode::kClosed,
                "this runtime belongs to the parent process; start one of your own after fork()"});
    }
    return *client_;
  }
  bool is_ours() const { return ::getpid() == owner_; }

 private:
  std::unique_ptr<ExpertClient> client_;
  pid_t owner_;
};

// Calls `use` with the client and without the GIL: even a short call may wait for the turn of a
// thread that drives.
template <class Use>
auto without_gil(ClientBox& box, Use use) {
  ExpertClient& client = box.get();
  py::gil_scoped_release unlocked;
  return use(client);
}

// Waits without the GIL in steps, so that Python sees signals in between. True: done.
bool wait_for(ExpertClient& client, const client::CallPtr& call, Deadline deadline) {
  for (;;) {
    bool is_done = false;
    {
      py::gil_scoped_release unlocked;
      is_done = client.wait(call, deadline.earlier(Deadline::after_ns(kSignalPeriodNs)));
    }
    if (is_done || deadline.has_passed()) return is_done;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

int64_t nanoseconds_of(double seconds) { return static_cast<int64_t>(seconds * 1e9); }

// A timeout as an option: positive and finite, so that every call ends.
int64_t timeout_ns(const char* name, double seconds) {
  if (seconds > 0 && seconds <= kMaxWaitS) return nanoseconds_of(seconds);
  raise(Error{ErrorCode::kInvalidArgument,
              std::string(name) + " is " + std::to_string(seconds) +
                  "; allowed are more than 0 and at most 1000000 seconds"});
}

Deadline deadline_of(double timeout_s) {
  // NaN: now
  return Deadline::after_ns(
      nanoseconds_of(timeout_s > 0 ? (timeout_s < kMaxWaitS ? timeout_s : kMaxWaitS) : 0));
}

// A call as Python holds it; keeps the tensors alive while the core may touch them.
class PyCall {
 public:
  PyCall(std::shared_ptr<ClientBox> box, client::CallPtr call, py::object keep)
      : box_(std::move(box)), call_(std::move(call)), keep_(std::move(keep)) {}
  PyCall(const PyCall&) = delete;
  PyCall& operator=(const PyCall&) = delete;
  ~PyCall() {
    if (call_ == nullptr || !box_->is_ours()) return;
    py::gil_scoped_release unlocked;
    box_->get().abandon(call_);  // nothing happens to a call that is done
  }

  bool is_done() {
    return without_gil(*box_, [this](ExpertClient& client) { return client.is_done(call_); });
  }
  bool wait(double timeout_s) {
    const bool done = wait_for(box_->get(), call_, deadline_of(timeout_s));
    if (done) keep_ = py::none();
    return done;
  }
  void result() { unwrap(box_->get().outcome(call_)); }
  void abandon() {
    without_gil(*box_, [this](ExpertClient& client) { client.abandon(call_); });
    keep_ = py::none();
  }

 private:
  std::shared_ptr<ClientBox> box_;
  client::CallPtr call_;
  py::object keep_;
};

client::CallPtr submit_call(ExpertClient& client, uint32_t layer, uintptr_t hidden_states,
                            int64_t row_stride_bytes, const std::string& dtype, uint32_t num_tokens,
                            uintptr_t topk_ids, bool ids_are_64bit, uintptr_t topk_weights,
                            const std::string& weights_dtype, uint32_t top_k, uintptr_t output) {
  client::TokenBatch batch;
  batch.hidden_states = reinterpret_cast<const std::byte*>(hidden_states);
  batch.row_stride_bytes = row_stride_bytes;
  batch.dtype = parse_dtype(dtype);
  batch.num_tokens = num_tokens;
  batch.top_k = top_k;
  batch.topk_ids = reinterpret_cast<const void*>(topk_ids);
  batch.ids_are_64bit = ids_are_64bit;
  batch.topk_weights = reinterpret_cast<const std::byte*>(topk_weights);
  batch.weights_dtype = parse_dtype(weights_dtype);
  batch.output = reinterpret_cast<std::byte*>(output);
  Result<client::CallPtr> submitted = [&] {
    py::gil_scoped_release unlocked;
    return client.submit(batch, layer);
  }();
  return unwrap(std::move(submitted));
}

// Ends a call in every case before the caller's tensors may go: on a signal or error it is
// abandoned.
class AbandonOnExit {
 public:
  AbandonOnExit(ExpertClient& client, client::CallPtr call)
      : client_(client), call_(std::move(call)) {}
  AbandonOnExit(const AbandonOnExit&) = delete;
  AbandonOnExit& operator=(const AbandonOnExit&) = delete;
  ~AbandonOnExit() {
    if (is_done) return;
    py::gil_scoped_release unlocked;
    client_.abandon(call_);
  }
  bool is_done = false;

 private:
  ExpertClient& client_;
  client::CallPtr call_;
};

void run_call(ClientBox& box, uint32_t layer, uintptr_t hidden_states, int64_t row_stride_bytes,
              const std::string& dtype, uint32_t num_tokens, uintptr_t topk_ids, bool ids_are_64bit,
              uintptr_t topk_weights, const std::string& weights_dtype, uint32_t top_k,
              uintptr_t output, const py::object& /*keep*/) {
  ExpertClient& client = box.get();
  const auto call =
      submit_call(client, layer, hidden_states, row_stride_bytes, dtype, num_tokens, topk_ids,
                  ids_are_64bit, topk_weights, weights_dtype, top_k, output);
  AbandonOnExit guard(client, call);
  while (!wait_for(client, call, deadline_of(kMaxWaitS))) {
  }
  guard.is_done = true;
  unwrap(client.outcome(call));
}

uint32_t add_worker(ClientBox& box, const std::string& name, ChannelBox& channel,
                    uint64_t generation, int pulse_fd, uint32_t slice_tokens, uint32_t window,
                    const std::string& request_dtype, const std::string& reply_dtype,
                    bool is_measured) {
  client::WorkerLink link;
  link.pulse = OwnedFd(pulse_fd);
  link.name = name;
  link.channel = channel.take();
  link.generation = generation;
  link.policy = {slice_tokens, window, is_measured};
  link.request_dtype = parse_dtype(request_dtype);
  link.reply_dtype = parse_dtype(reply_dtype);
  return unwrap(
      without_gil(box, [&](ExpertClient& client) { return client.add_worker(std::move(link)); }));
}

using ShardTuple = std::tuple<uint32_t, uint32_t, uint64_t, std::vector<uint32_t>>;

void define_layer(ClientBox& box, uint32_t layer, const std::string& name, uint32_t in_size,
                  uint32_t out_size, uint32_t num_experts, const std::vector<ShardTuple>& shards,
                  uint32_t cost_class) {
  client::LayerPlan plan{layer, name, in_size, out_size, num_experts, {}, cost_class};
  for (const auto& [shard, worker, fingerprint, experts] : shards) {
    plan.shards.push_back(client::ShardPlace{shard, worker, fingerprint, experts});
  }
  unwrap(without_gil(box, [&](ExpertClient& client) { return client.define_layer(plan); }));
}

void bind_call(py::module_& module) {
  py::class_<PyCall>(module, "Call")
      .def("is_done", &PyCall::is_done)
      .def("wait", &PyCall::wait, py::arg("timeout_s"))
      .def("result", &PyCall::result)
      .def("abandon", &PyCall::abandon);
}

}  // namespace

void bind_client(py::module_& module) {
  bind_call(module);
  py::class_<ClientBox, std::shared_ptr<ClientBox>>(module, "Client")
      .def(py::init([](int64_t spin_ns, double call_timeout_s, double stall_timeout_s,
                       uint32_t max_calls) {
             client::ClientOptions options;
             options.spin_ns = spin_ns;
             options.call_timeout_ns = timeout_ns("call_timeout_s", call_timeout_s);
             options.stall_timeout_ns = timeout_ns("stall_timeout_s", stall_timeout_s);
             options.max_calls = max_calls;
             return std::make_shared<ClientBox>(options);
           }),
           py::kw_only(), py::arg("spin_ns"), py::arg("call_timeout_s"), py::arg("stall_timeout_s"),
           py::arg("max_calls") = 1024)
      .def("add_worker", &add_worker, py::kw_only(), py::arg("name"), py::arg("channel"),
           py::arg("generation"), py::arg("pulse_fd"), py::arg("slice_tokens"), py::arg("window"),
           py::arg("request_dtype"), py::arg("reply_dtype"), py::arg("is_measured") = false)
      .def(
          "replace_channel",
          [](ClientBox& box, uint32_t worker, ChannelBox& channel, uint64_t generation) {
            auto taken = channel.take();
            unwrap(without_gil(box, [&](ExpertClient& client) {
              return client.replace_channel(worker, std::move(taken), generation);
            }));
          },
          py::arg("worker"), py::arg("channel"), py::arg("generation"))
      .def(
          "set_policy",
          [](ClientBox& box, uint32_t worker, uint32_t slice_tokens, uint32_t window,
             bool is_measured) {
            unwrap(without_gil(box, [&](ExpertClient& client) {
              return client.set_policy(worker, {slice_tokens, window, is_measured});
            }));
          },
          py::arg("worker"), py::arg("slice_tokens"), py::arg("window"),
          py::arg("is_measured") = false)
      .def(
          "set_dtypes",
          [](ClientBox& box, uint32_t worker, const std::string& request_dtype,
             const std::string& reply_dtype) {
            const Dtype request = parse_dtype(request_dtype), reply = parse_dtype(reply_dtype);
            unwrap(without_gil(box, [&](ExpertClient& client) {
              return client.set_dtypes(worker, request, reply);
            }));
          },
          py::arg("worker"), py::arg("request_dtype"), py::arg("reply_dtype"))
      .def("define_layer", &define_layer, py::kw_only(), py::arg("layer"), py::arg("name"),
           py::arg("in_size"), py::arg("out_size"), py::arg("num_experts"), py::arg("shards"),
           py::arg("cost_class") = 0)
      .def(
          "submit",
          [](const std::shared_ptr<ClientBox>& box, uint32_t layer, uintptr_t hidden_states,
             int64_t row_stride_bytes, const std::string& dtype, uint32_t num_tokens,
             uintptr_t topk_ids, bool ids_are_64bit, uintptr_t topk_weights,
             const std::string& weights_dtype, uint32_t top_k, uintptr_t output, py::object keep) {
            auto call =
                submit_call(box->get(), layer, hidden_states, row_stride_bytes, dtype, num_tokens,
                            topk_ids, ids_are_64bit, topk_weights, weights_dtype, top_k, output);
            return std::make_unique<PyCall>(box, std::move(call), std::move(keep));
          },
          py::arg("layer"), py::arg("hidden_states"), py::arg("row_stride_bytes"), py::arg("dtype"),
          py::arg("num_tokens"), py::arg("topk_ids"), py::arg("ids_are_64bit"),
          py::arg("topk_weights"), py::arg("weights_dtype"), py::arg("top_k"), py::arg("output"),
          py::arg("keep"))
      .def("run", &run_call)
      .def(
          "mark_lost",
          [](ClientBox& box, uint32_t worker, const std::string& reason) {
            without_gil(box, [&](ExpertClient& client) { client.mark_lost(worker, reason); });
          },
          py::arg("worker"), py::arg("reason"))
      .def(
          "begin_step",
          [](ClientBox& box, uint32_t num_calls) {
            StepLease lease;
            lease.num_calls = num_calls;
            lease.lanes = unwrap(without_gil(box, [&](ExpertClient& client) {
              return client.begin_step(num_calls, &lease.first_call);
            }));
            return lease;
          },
          py::arg("num_calls"))
      .def("judge_step",
           [](ClientBox& box) {
             unwrap(without_gil(box, [](ExpertClient& client) { return client.judge_step(); }));
           })
      .def(
          "end_step",
          [](ClientBox& box, const StepReport* report) {
            without_gil(box, [report](ExpertClient& client) {
              if (report == nullptr) return client.end_step({}, {}, true);
              client.end_step(report->heads, report->messages, report->code != 0);
            });
          },
          py::arg("report").none(true))
      .def("counters",
           [](ClientBox& box) {
             return counters_dict(
                 without_gil(box, [](ExpertClient& client) { return client.counters(); }));
           })
      .def("workers",
           [](ClientBox& box) {
             return worker_dicts(
                 without_gil(box, [](ExpertClient& client) { return client.workers(); }));
           })
      .def("forecasts",
           [](ClientBox& box) {
             return forecast_dicts(
                 without_gil(box, [](ExpertClient& client) { return client.forecasts(); }));
           })
      .def(
          "set_profile",
          [](ClientBox& box, bool on) {
            without_gil(box, [on](ExpertClient& client) { client.set_profile(on); });
          },
          py::arg("on"))
      .def("take_traces", [](ClientBox& box) {
        return trace_dicts(
            without_gil(box, [](ExpertClient& client) { return client.take_traces(); }));
      });
}

}  // namespace dflash::bindings
