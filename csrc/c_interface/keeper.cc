// The keeper: a thread that renews worn paths, takes lost workers back, reports losses and
// counters, and ends all calls when the supervisor is gone. It sleeps in one poll.
// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/result.h"
#include "c_interface/session.h"

namespace dflash::c_interface {
namespace {

constexpr int64_t kLastSendPatienceNs = 200'000'000;  // of the last counters, at close and exit

}  // namespace

void Session::keep() {
  Status kept = ok();
  bool has_exited = false;
  int64_t counted_ns = now_ns();
  while (kept.ok() && !is_stopping_.load(std::memory_order_relaxed)) {
    std::array<pollfd, 3> awaited{
        {{connection_->fd(), POLLIN, 0}, {client_.worn_fd(), POLLIN, 0}, {bell_.get(), POLLIN, 0}}
    };
    const int found = ::poll(awaited.data(), awaited.size(), kCountPeriodNs / 1'000'000);
    if (found < 0 && errno != EINTR) kept = system_error("cannot wait for the supervisor");
    if (awaited[2].revents != 0) {
      uint64_t count = 0;
      static_cast<void>(::read(bell_.get(), &count, sizeof count));
    }
    if (kept.ok() && awaited[0].revents != 0) kept = serve_connection();
    if (kept.ok() && awaited[1].revents != 0) kept = request_paths();
    if (kept.ok() && may_have_losses_.exchange(false, std::memory_order_relaxed))
      kept = report_losses();
    if (const int64_t now = now_ns(); kept.ok() && now - counted_ns >= kCountPeriodNs) {
      counted_ns = now;
      kept = send_counters();
    }
    if (kept.ok() && !has_exited && is_exiting_.load(std::memory_order_relaxed)) {
      has_exited = true;
      send_last();
    }
  }
  if (!kept.ok()) {
    end_all(kept.error().message);
    ring(exit_bell_);  // nobody need wait for counters that nobody takes
  } else {
    send_last();
  }
}

void Session::send_last() {
  static_cast<void>(connection_->send(count(), {}, Deadline::after_ns(kLastSendPatienceNs)));
  ring(exit_bell_);
}

Status Session::serve_connection() {
  auto received = connection_->receive(Deadline::after_ns(kFrameRestNs));
  if (!received.ok()) return std::move(received).error();
  return handle(std::move(received).value());
}

Status Session::handle(Received received) {
  const uint32_t num_workers = plan_.head.num_workers;
  if (const auto* terms = std::get_if<wire::PathTermsMessage>(&received.message)) {
    Status offered = paths_.offer(*terms, *connection_, Deadline::after_ns(kSendPatienceNs));
    if (offered.ok() || terms->worker >= num_workers ||
        offered.error().code == ErrorCode::kClosed || offered.error().code == ErrorCode::kTimeout)
      return offered;
    return lose(terms->worker, offered.error().message);
  }
  if (const auto* answered = std::get_if<wire::PathAnswered>(&received.message)) {
    // The answer of a worker that was given up while it was on its way is dropped.
    if (answered->worker >= num_workers || !paths_.awaits(answered->worker)) return ok();
    auto made = paths_.complete(*answered, std::move(received.descriptors));
    if (!made.ok()) return lose(answered->worker, made.error().message);
    return renew(std::move(made).value());
  }
  if (const auto* gone = std::get_if<wire::WorkerGone>(&received.message)) {
    if (gone->worker >= num_workers)
      return Error{ErrorCode::kProtocol, "the supervisor lost a worker " +
                                             std::to_string(gone->worker) +
                                             ", which the plan does not have"};
    is_loss_known_[gone->worker] = true;
    paths_.give_up(gone->worker);
    client_.mark_lost(gone->worker, gone->reason);
    return ok();
  }
  if (const auto* refused = std::get_if<wire::RefuseHandover>(&received.message))
    return Error{ErrorCode::kClosed, "the supervisor ended the hand-over: " + refused->text};
  return Error{ErrorCode::kProtocol, std::string("the supervisor sent ") +
                                         wire::handover_message_name(received.message) +
                                         " where it does not belong"};
}

// Gives a worker its fresh path. A pulse comes with the first path of a session, and means that the
// worker behind it is another process than before.
Status Session::renew(MadePath made) {
  const uint32_t worker = made.worker;
  Status renewed = ok();
  if (made.pulse.is_open()) {
    client_.mark_lost(worker, "another process took its place");  // nothing happens to a lost one
    renewed = client_.replace_worker(worker, std::move(made.path), std::move(made.pulse));
    if (renewed.ok()) is_loss_known_[worker] = false;
  } else {
    renewed = client_.renew_path(worker, std::move(made.path));
    if (!renewed.ok() && renewed.error().code == ErrorCode::kWorkerLost) return report_losses();
  }
  if (renewed.ok()) return ok();
  return lose(worker, renewed.error().message);
}

Status Session::lose(uint32_t worker, const std::string& reason) {
  // The supervisor has just tried to bring it back or to renew its path, and hears how that went.
  is_loss_known_[worker] = false;
  paths_.give_up(worker);
  client_.mark_lost(worker, reason);
  return report_losses();
}

Status Session::report_losses() {
  const std::vector<client::WorkerReport> workers = client_.workers();
  for (uint32_t i = 0; i < workers.size(); ++i) {
    if (workers[i].path != client::PathState::kLost || is_loss_known_[i]) continue;
    is_loss_known_[i] = true;
    paths_.give_up(i);
    DFLASH_TRY(send(wire::WorkerGone{i, workers[i].reason}));
  }
  return ok();
}

Status Session::request_paths() {
  for (const client::WornPath& worn : client_.retire_worn_paths())
    DFLASH_TRY(send(wire::PathWorn{worn.worker, worn.reason}));
  return ok();
}

Status Session::send_counters() {
  bool is_old = false;
  {
    const std::lock_guard lock(mutex_);
    is_old = num_counted_ended_ != num_ended_ && num_open_ == 0 &&
             now_ns() - last_ended_ns_ >= kCountPeriodNs / 2;
  }
  // While calls come one after another, the threads that end them take the snapshot (session.cc),
  // so that this one need not interrupt a thread that drives the client.
  if (is_old) snapshot();
  wire::Counted counted;
  {
    const std::lock_guard lock(mutex_);
    counted = counted_;
  }
  if (counted == sent_) return ok();
  sent_ = counted;
  return send(counted);
}

}  // namespace dflash::c_interface
