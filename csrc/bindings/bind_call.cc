// Calls: the tensors of one, and a submitted one as Python holds it. `Client.run` is the hot path
// of every MoE layer: it crosses from Python once and releases the GIL while it waits.
// SPDX-License-Identifier: Apache-2.0

#include <string>

#include "bindings/arguments.h"
#include "bindings/client_box.h"

namespace py = pybind11;

namespace dflash::bindings {
namespace {

// Ends a call in every case before the caller's tensors may go: on a signal it is abandoned.
class AbandonOnExit {
 public:
  AbandonOnExit(ExpertClient& client, client::CallPtr call)
      : client_(client), call_(std::move(call)) {}
  AbandonOnExit(const AbandonOnExit&) = delete;
  AbandonOnExit& operator=(const AbandonOnExit&) = delete;
  ~AbandonOnExit() {
    if (!is_done) client_.abandon(call_);
  }
  bool is_done = false;

 private:
  ExpertClient& client_;
  client::CallPtr call_;
};

client::CallPtr submit_call(ExpertClient& client, uint32_t layer, const TokenBatch& batch) {
  Result<client::CallPtr> submitted = [&] {
    py::gil_scoped_release unlocked;
    return client.submit(batch, layer);
  }();
  return unwrap(std::move(submitted));
}

TokenBatchBox make_batch(uintptr_t hidden_states, int64_t row_stride_bytes,
                         const std::string& dtype, uint32_t num_tokens, uint32_t top_k,
                         uintptr_t topk_ids, bool ids_are_64bit, uintptr_t topk_weights,
                         const std::string& weights_dtype, uintptr_t output, py::object owners) {
  TokenBatch batch;
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
  return {batch, std::move(owners)};
}

// Makes a reader of one field for Python.
template <class Field>
auto field_of(Field TokenBatch::* field) {
  return [field](const TokenBatchBox& self) { return self.batch.*field; };
}
template <class Pointer>
auto address_of(Pointer TokenBatch::* field) {
  return
      [field](const TokenBatchBox& self) { return reinterpret_cast<uintptr_t>(self.batch.*field); };
}
auto dtype_of(Dtype TokenBatch::* field) {
  return [field](const TokenBatchBox& self) { return dtype_name(self.batch.*field); };
}

}  // namespace

// A submitted call. Once it has been seen done, it lets go of client and tensors, so that a result
// which is kept keeps no data path open. Its members change only with the GIL held, and any number
// of threads may wait.
class PyCall {
 public:
  PyCall(std::shared_ptr<ClientBox> box, uint32_t layer, const TokenBatchBox& batch)
      : box_(std::move(box)), client_(box_->get()), owners_(batch.owners) {
    call_ = submit_call(*client_, layer, batch.batch);
  }
  PyCall(const PyCall&) = delete;
  PyCall& operator=(const PyCall&) = delete;
  ~PyCall() {
    if (client_ == nullptr) return;
    if (!box_->is_ours()) {  // leaked in a forked child, as ClientBox does
      new std::shared_ptr<ExpertClient>(std::move(client_));
      return;
    }
    py::gil_scoped_release unlocked;
    client_->abandon(call_);  // nothing happens to a call that is done
    client_.reset();
  }

  bool is_done() {
    if (const auto client = live_client()) {
      bool is_done = false;
      {
        py::gil_scoped_release unlocked;
        is_done = client->is_done(call_);
      }
      if (!is_done) return false;
      let_go();
    }
    return true;
  }
  bool wait(double timeout_s) {
    if (const auto client = live_client()) {
      if (!repeat_until(deadline_of(timeout_s),
                        [&](Deadline tick) { return client->wait(call_, tick); })) {
        return false;
      }
      let_go();
    }
    return true;
  }
  // Raises how the call ended; it must be done.
  void result() {
    if (!is_done()) raise(Error{ErrorCode::kInvalidArgument, "the call is not done"});
    if (error_) raise(*error_);
  }
  void abandon() {
    if (const auto client = live_client()) {
      {
        py::gil_scoped_release unlocked;
        client->abandon(call_);
      }
      let_go();
    }
  }

 private:
  // The client, or null once the call has been seen done.
  std::shared_ptr<ExpertClient> live_client() const {
    if (client_ != nullptr && !box_->is_ours()) static_cast<void>(box_->get());  // get() raises
    return client_;
  }
  void let_go() {
    if (client_ == nullptr) return;  // because another waiter came first
    Status outcome = client_->outcome(call_);
    if (!outcome.ok()) error_ = std::move(outcome).error();
    client_.reset();
    owners_ = py::none();
  }

  std::shared_ptr<ClientBox> box_;
  std::shared_ptr<ExpertClient> client_;
  client::CallPtr call_;
  std::optional<Error> error_;
  py::object owners_;
};

void await_call(ExpertClient& client, const client::CallPtr& call) {
  while (!client.wait(call, Deadline::after_ns(kSignalPeriodNs))) raise_signals();
}

void run_call(const ClientBox& box, uint32_t layer, const TokenBatchBox& batch) {
  const std::shared_ptr<ExpertClient> client = box.get();
  Status outcome = ok();
  {
    py::gil_scoped_release unlocked;
    outcome = [&]() -> Status {
      Result<client::CallPtr> submitted = client->submit(batch.batch, layer);
      if (!submitted.ok()) return std::move(submitted).error();
      const client::CallPtr call = std::move(submitted).value();
      AbandonOnExit guard(*client, call);
      await_call(*client, call);
      guard.is_done = true;
      return client->outcome(call);
    }();
  }
  unwrap(std::move(outcome));
}

void bind_token_batch(py::module_& module) {
  py::class_<TokenBatchBox>(
      module, "TokenBatch",
      "The tensors of one call, made once. It keeps `owners` alive while the core may touch them. "
      "`hidden_states`, `topk_ids`, `topk_weights` and `output` are addresses.")
      .def(py::init(&make_batch), py::arg("hidden_states"), py::arg("row_stride_bytes"),
           py::arg("dtype"), py::arg("num_tokens"), py::arg("top_k"), py::arg("topk_ids"),
           py::arg("ids_are_64bit"), py::arg("topk_weights"), py::arg("weights_dtype"),
           py::arg("output"), py::arg("owners"))
      .def_property_readonly("hidden_states", address_of(&TokenBatch::hidden_states))
      .def_property_readonly("row_stride_bytes", field_of(&TokenBatch::row_stride_bytes))
      .def_property_readonly("dtype", dtype_of(&TokenBatch::dtype))
      .def_property_readonly("num_tokens", field_of(&TokenBatch::num_tokens))
      .def_property_readonly("top_k", field_of(&TokenBatch::top_k))
      .def_property_readonly("topk_ids", address_of(&TokenBatch::topk_ids))
      .def_property_readonly("ids_are_64bit", field_of(&TokenBatch::ids_are_64bit))
      .def_property_readonly("topk_weights", address_of(&TokenBatch::topk_weights))
      .def_property_readonly("weights_dtype", dtype_of(&TokenBatch::weights_dtype))
      .def_property_readonly("output", address_of(&TokenBatch::output))
      .def_readonly("owners", &TokenBatchBox::owners);
}

void bind_call(py::module_& module) {
  py::class_<PyCall>(module, "Call", "A submitted call. Any number of threads may call.")
      .def(py::init<std::shared_ptr<ClientBox>, uint32_t, const TokenBatchBox&>(),
           py::arg("client"), py::arg("layer"), py::arg("batch"),
           "It submits the call. ConfigError and WorkerLost are raised at once.")
      .def("is_done", &PyCall::is_done)
      .def("wait", &PyCall::wait, py::arg("timeout_s"),
           "Says whether the call is done, after at most `timeout_s`.")
      .def("result", &PyCall::result, "Raises the error with which the call ended, if it did.")
      .def("abandon", &PyCall::abandon);
}

}  // namespace dflash::bindings
