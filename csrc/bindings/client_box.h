// The client as Python holds it. Its owner closes it, threads may still be inside it then, and a
// forked child cannot use it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/token_batch.h"
#include "bindings/errors.h"
#include "bindings/typed.h"
#include "client/expert_client.h"
#include "client/types.h"

namespace dflash::bindings {

using client::ExpertClient;

inline constexpr int64_t kSignalPeriodNs = 20'000'000;  // how late a wait may see Ctrl-C

class ClientBox {
 public:
  explicit ClientBox(const client::ClientOptions& options)
      : client_(std::make_shared<ExpertClient>(options)), owner_(::getpid()) {}
  ClientBox(const ClientBox&) = delete;
  ClientBox& operator=(const ClientBox&) = delete;
  ~ClientBox() {
    // In a forked child the client is leaked, because closing would hang up the parent's
    // connections.
    if (!is_ours()) new std::shared_ptr<ExpertClient>(std::move(client_));
  }

  // Returns the client and keeps it alive for the caller, whatever other threads do. Raises after
  // close() and in a forked child. The caller holds the GIL.
  std::shared_ptr<ExpertClient> get() const {
    if (!is_ours()) {
      raise(
          Error{ErrorCode::kClosed,
                "this runtime belongs to the parent process; start one of your own after fork()"});
    }
    if (client_ == nullptr) {
      raise(Error{ErrorCode::kInvalidArgument, "this ExpertRuntime is closed; start another"});
    }
    return client_;
  }
  // The client's channels close once the last call that is still inside has left.
  void close() {
    if (!is_ours() || client_ == nullptr) return;
    std::shared_ptr<ExpertClient> client = std::move(client_);
    pybind11::gil_scoped_release unlocked;
    client->close();
    client.reset();
  }
  bool is_ours() const { return ::getpid() == owner_; }

 private:
  std::shared_ptr<ExpertClient> client_;
  pid_t owner_;
};

// Calls `use` with the client and without the GIL, because even a short call may wait for the turn
// of a thread that drives.
template <class Use>
auto without_gil(const ClientBox& box, Use use) {
  const std::shared_ptr<ExpertClient> client = box.get();
  pybind11::gil_scoped_release unlocked;
  return use(*client);
}

// Repeats `step(tick)` without the GIL until it returns true or `deadline` passes. Between two
// steps Python sees signals. Returns what the last step returned.
template <class Step>
bool repeat_until(Deadline deadline, Step step) {
  for (;;) {
    bool is_done = false;
    {
      pybind11::gil_scoped_release unlocked;
      is_done = step(deadline.earlier(Deadline::after_ns(kSignalPeriodNs)));
    }
    if (is_done || deadline.has_passed()) return is_done;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

// Raises what a signal's handler raises. Needs no GIL.
inline void raise_signals() {
  pybind11::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

// Returns once a submitted call is done. It needs no GIL; between two waits Python sees signals,
// and what these raise ends the wait, not the call.
void await_call(ExpertClient& client, const client::CallPtr& call);

// Reads a span of time that is an option: positive and finite, so that every wait ends.
inline constexpr double kMaxWaitS = 1e6;  // above any sensible limit, and far below an overflow
int64_t timeout_ns(const char* name, double seconds);
// Makes a deadline `seconds` from now, at most kMaxWaitS. A negative number or NaN means now.
Deadline deadline_of(double seconds);

// A call's tensors as Python holds them: the value that every room passes on, and what keeps its
// memory alive.
struct TokenBatchBox {
  TokenBatch batch;
  pybind11::object owners;  // the tensors, or whatever else keeps the addresses valid
};

// How a device step ended. DeviceStep hands it to Client.end_step and to whoever explains a
// failure.
struct StepReport {
  int32_t code = 0;  // ErrorCode of the first failure, or 0
  uint32_t layer = 0, detail = 0;
  std::string worker;  // where it failed; empty where it was at none
  std::string text;    // the worker's words if it refused
  client::StepResult result;
};

// Submits a call and waits for it, with the GIL released. Raises how the call ended. A signal
// abandons the call.
void run_call(const ClientBox& box, uint32_t layer, const TokenBatchBox& batch);

// What the client reports, as Python dictionaries whose keys are the names of fields
// (client_reports.cc).
using CountersByPlace =
    pybind11::typing::Dict<pybind11::typing::Tuple<pybind11::int_, pybind11::int_>, Counts>;
// Maps (worker, layer) to the fields of Counters.
CountersByPlace counters_dict(const std::vector<client::CountersOf>& list);
pybind11::typing::List<Fields> worker_dicts(const std::vector<client::WorkerReport>& list);
pybind11::typing::List<Fields> forecast_dicts(const std::vector<client::WorkerForecast>& list);
pybind11::typing::List<Counts> trace_dicts(const std::vector<client::SliceTrace>& list);

}  // namespace dflash::bindings
