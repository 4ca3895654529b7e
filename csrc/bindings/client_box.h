// The client as Python holds it: closed by its owner, used by threads that may still be inside
// then, and of no use in a forked child.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>

#include "base/clock.h"
#include "bindings/errors.h"
#include "client/expert_client.h"

namespace dflash::bindings {

using client::ExpertClient;

inline constexpr int64_t kSignalPeriodNs = 20'000'000;  // how late Ctrl-C may be seen inside a wait

class ClientBox {
 public:
  explicit ClientBox(const client::ClientOptions& options)
      : client_(std::make_shared<ExpertClient>(options)), owner_(::getpid()) {}
  ClientBox(const ClientBox&) = delete;
  ClientBox& operator=(const ClientBox&) = delete;
  ~ClientBox() {
    // Closing in a forked child would hang up the parent's connections: there it is leaked.
    if (!is_ours()) new std::shared_ptr<ExpertClient>(std::move(client_));
  }

  // Keeps the client alive for the caller, whatever other threads do. The caller holds the GIL.
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
  // Its channels close once the last call that is still inside has left.
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

// Calls `use` with the client and without the GIL: even a short call may wait for the turn of a
// thread that drives.
template <class Use>
auto without_gil(const ClientBox& box, Use use) {
  const std::shared_ptr<ExpertClient> client = box.get();
  pybind11::gil_scoped_release unlocked;
  return use(*client);
}

// Repeats `step(tick)` without the GIL until it returns true or `deadline` passes, in steps between
// which Python sees signals. Returns what it returned last.
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

// A span of time as an option: positive and finite, so that every wait ends.
inline constexpr double kMaxWaitS = 1e6;  // above any sensible limit, far below overflow
int64_t timeout_ns(const char* name, double seconds);
// A deadline `seconds` from now, at most kMaxWaitS; a negative number or NaN means now.
Deadline deadline_of(double seconds);

}  // namespace dflash::bindings
