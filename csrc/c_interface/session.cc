// Calls and counters. The host's client does the work; here is who owns a call, how it is counted,
// and how all of them end when the supervisor is gone.
// SPDX-License-Identifier: Apache-2.0
#include "c_interface/session.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <utility>

#include "client/call.h"

namespace dflash::c_interface {
namespace {

bool is_loss(const Error& error) {
  return error.code == ErrorCode::kWorkerLost || error.code == ErrorCode::kProtocol;
}

}  // namespace

Session::Session(std::unique_ptr<Connection> connection, Plan plan, PathExchange paths)
    : owner_(::getpid()),
      plan_(std::move(plan)),
      connection_(std::move(connection)),
      client_(plan_.client_options()),
      bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      exit_bell_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
      paths_(std::move(paths)),
      is_loss_known_(plan_.workers.size()) {}

Session::~Session() {
  if (!keeper_.joinable()) return;
  end_all("the client was closed");
  is_stopping_.store(true, std::memory_order_relaxed);
  ring(bell_);
  keeper_.join();
}

void Session::ring(const OwnedFd& bell) {
  const uint64_t one = 1;
  static_cast<void>(::write(bell.get(), &one, sizeof one));
}

Result<OpenCall*> Session::submit(const TokenBatch& batch, uint32_t layer) {
  // Everything is allocated before the client has the batch, so that nothing can fail afterwards.
  auto open = std::make_unique<OpenCall>(*this);
  OpenCall* const call = open.get();
  {
    const std::lock_guard lock(mutex_);
    calls_.emplace(call, std::move(open));
  }
  auto submitted = client_.submit(batch, layer);
  bool is_late = false;
  {
    const std::lock_guard lock(mutex_);
    if (submitted.ok()) {
      call->call_ = std::move(submitted).value();
      ++num_open_;
      is_late = closed_reason_.has_value();
    } else {
      calls_.erase(call);
    }
  }
  // Whoever ended all calls did not see this one.
  if (is_late) client_.abandon(call->call_);
  if (submitted.ok()) return call;
  note_loss(submitted.error());
  return closed_or(std::move(submitted).error());
}

bool Session::wait(OpenCall& call, Deadline deadline) {
  if (!client_.wait(call.call_, deadline)) return false;
  book(call);
  return true;
}

Status Session::outcome(OpenCall& call) {
  Status outcome = client_.outcome(call.call_);
  if (outcome.ok()) return outcome;
  return closed_or(std::move(outcome).error());
}

// An end without a supervisor has that for its reason: workers that it started die with it, and
// which of both was seen first says nothing.
Error Session::closed_or(Error error) const {
  const bool may_follow = is_loss(error) || error.code == ErrorCode::kClosed;
  if (!may_follow) return error;
  {
    const std::lock_guard lock(mutex_);
    if (closed_reason_) return Error{ErrorCode::kClosed, *closed_reason_, std::move(error.place)};
  }
  if (!connection_->is_hung_up()) return error;
  return Error{ErrorCode::kClosed, "the supervisor hung up", std::move(error.place)};
}

void Session::abandon(OpenCall* call) {
  client_.abandon(call->call_);
  book(*call);
  std::unique_ptr<OpenCall> freed;
  const std::lock_guard lock(mutex_);
  const auto found = calls_.find(call);
  if (found == calls_.end()) return;
  freed = std::move(found->second);
  calls_.erase(found);
}

// Has the keeper look for workers that the supervisor must be told of.
void Session::note_loss(const Error& error) {
  if (!is_loss(error)) return;
  may_have_losses_.store(true, std::memory_order_relaxed);
  ring(bell_);
}

// Adds a call that is done to the totals, once.
void Session::book(OpenCall& call) {
  const Status outcome = client_.outcome(call.call_);
  bool is_due = false;
  {
    const std::lock_guard lock(mutex_);
    if (call.is_booked_) return;
    call.is_booked_ = true;
    --num_open_;
    ++num_ended_;
    if (!outcome.ok()) ++num_failed_;
    call_ns_ += static_cast<uint64_t>(call.call_->ended_ns - call.call_->submitted_ns);
    const int64_t now = now_ns();
    last_ended_ns_ = now;
    is_due = now >= next_snapshot_ns_;
    if (is_due) next_snapshot_ns_ = now + kCountPeriodNs;
  }
  if (!outcome.ok()) note_loss(outcome.error());
  if (is_due) snapshot();
}

wire::Counted Session::count() const {
  wire::Counted counted;
  for (const client::CountersOf& one : client_.counters()) {
    counted.messages += one.counters.calls;
    counted.rows += one.counters.rows;
    counted.request_bytes += one.counters.request_bytes;
    counted.reply_bytes += one.counters.reply_bytes;
    counted.floor_bytes += one.counters.floor_bytes;
    counted.compute_ns += static_cast<uint64_t>(one.counters.worker_compute_ns);
  }
  const std::lock_guard lock(mutex_);
  counted.calls = num_ended_;
  counted.failed_calls = num_failed_;
  counted.call_ns = call_ns_;
  return counted;
}

// Taken by a thread whose call has just ended, because the keeper would have to interrupt one that
// drives (client/turn.h), which costs the calls of a single-threaded program their futex.
void Session::snapshot() {
  const wire::Counted counted = count();
  const std::lock_guard lock(mutex_);
  counted_ = counted;
  num_counted_ended_ = counted.calls;
}

void Session::end_all(const std::string& reason) {
  std::vector<client::CallPtr> ended;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_reason_) closed_reason_ = reason;
    for (const auto& [call, owned] : calls_) {
      if (call->call_ != nullptr) ended.push_back(call->call_);
    }
  }
  client_.close();
  for (const client::CallPtr& call : ended) client_.abandon(call);
}

Status Session::send(const wire::HandoverMessage& message) {
  return connection_->send(message, {}, Deadline::after_ns(kSendPatienceNs));
}

void Session::report_tensor(const std::string& name, const std::string& reason) {
  static_cast<void>(send(wire::TensorSeen{name, reason}));
}

void Session::send_last_counters() {
  is_exiting_.store(true, std::memory_order_relaxed);
  ring(bell_);
  pollfd one{exit_bell_.get(), POLLIN, 0};
  ::poll(&one, 1, kExitPatienceMs);
}

}  // namespace dflash::c_interface
