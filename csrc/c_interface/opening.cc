// Takes a hand-over: the token, the plan, a path to every worker, and that all is ready.
// SPDX-License-Identifier: Apache-2.0
#include <signal.h>

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

#include "base/result.h"
#include "c_interface/session.h"
#include "wire/payload.h"

namespace dflash::c_interface {
namespace {

Error unexpected(const wire::HandoverMessage& message) {
  return Error{ErrorCode::kProtocol, std::string("the supervisor sent ") +
                                         wire::handover_message_name(message) +
                                         " where it does not belong"};
}

// Receives a message, and makes an error of what ends a hand-over.
Result<Received> next(Connection& connection, Deadline deadline) {
  auto received = connection.receive(deadline);
  if (!received.ok()) return std::move(received).error().with("while taking the hand-over");
  if (const auto* refused = std::get_if<wire::RefuseHandover>(&received.value().message))
    return Error{ErrorCode::kWorkerFailed, "the supervisor refuses: " + refused->text};
  return received;
}

Result<Plan> take_plan(Connection& connection, Deadline deadline) {
  PlanReader reader;
  while (!reader.is_complete()) {
    auto received = next(connection, deadline);
    if (!received.ok()) return std::move(received).error();
    DFLASH_TRY(reader.take(std::move(received.value().message)));
  }
  return std::move(reader).take_plan();
}

// Makes a path for every worker, in whatever order the supervisor goes, until it is ready.
Result<std::vector<MadePath>> make_paths(Connection& connection, PathExchange& paths,
                                         const Plan& plan, Deadline deadline) {
  std::vector<MadePath> made(plan.workers.size());
  for (;;) {
    auto received = next(connection, deadline);
    if (!received.ok()) return std::move(received).error();
    wire::HandoverMessage& message = received.value().message;
    if (const auto* terms = std::get_if<wire::PathTermsMessage>(&message)) {
      DFLASH_TRY(paths.offer(*terms, connection, deadline));
    } else if (const auto* answered = std::get_if<wire::PathAnswered>(&message)) {
      auto path = paths.complete(*answered, std::move(received.value().descriptors));
      if (!path.ok()) return std::move(path).error();
      const uint32_t worker = path.value().worker;
      made[worker] = std::move(path).value();
    } else if (const auto* gone = std::get_if<wire::WorkerGone>(&message)) {
      const std::string name = gone->worker < plan.workers.size() ? plan.workers[gone->worker].name
                                                                  : std::to_string(gone->worker);
      return Error{ErrorCode::kWorkerLost, "worker " + name + " was lost: " + gone->reason};
    } else if (std::holds_alternative<wire::HandoverReady>(message)) {
      return made;
    } else {
      return unexpected(message);
    }
  }
}

}  // namespace

Result<std::unique_ptr<Session>> Session::open(const SupervisorAddress& supervisor) {
  const Deadline deadline = Deadline::after_ns(kOpenPatienceNs);
  auto dialled = Connection::dial(supervisor.path, deadline);
  if (!dialled.ok()) return std::move(dialled).error();
  Connection& connection = *dialled.value();
  // A supervisor that refuses at once may have hung up before it read this; what it says is still
  // to be received.
  const wire::OpenHandover greeting{wire::kHandoverVersion, supervisor.token,
                                    wire::layout_fingerprint()};
  Status greeted = connection.send(greeting, {}, deadline);
  if (!greeted.ok() && greeted.error().code != ErrorCode::kClosed)
    return std::move(greeted).error();
  auto plan = take_plan(connection, deadline);
  if (!plan.ok()) return std::move(plan).error();
  PathExchange paths(plan.value().head.num_workers);
  auto made = make_paths(connection, paths, plan.value(), deadline);
  if (!made.ok()) return std::move(made).error();
  std::unique_ptr<Session> session(
      new Session(std::move(dialled).value(), std::move(plan).value(), std::move(paths)));
  if (!session->bell_.is_open() || !session->exit_bell_.is_open() || session->client_.worn_fd() < 0)
    return system_error("cannot make the bells of a client");
  DFLASH_TRY(session->take_paths(std::move(made).value()));
  DFLASH_TRY(session->start_keeper());
  return session;
}

// The program's signals are the program's: none of its handlers runs on the keeper.
Status Session::start_keeper() {
  sigset_t all, former;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &former);
  Status started = ok();
  try {
    keeper_ = std::thread([this] {
      try {
        keep();
      } catch (const std::bad_alloc&) {  // which would otherwise end the program
        end_all("out of memory");
        ring(exit_bell_);
      }
    });
  } catch (const std::system_error& error) {
    started = system_error("cannot start the thread that keeps the supervisor's connection",
                           error.code().value());
  }
  ::pthread_sigmask(SIG_SETMASK, &former, nullptr);
  return started;
}

Status Session::take_paths(std::vector<MadePath> made) {
  for (size_t i = 0; i < plan_.workers.size(); ++i) {
    const wire::PlannedWorker& planned = plan_.workers[i];
    if (made[i].path.channel == nullptr || !made[i].pulse.is_open()) {
      return Error{ErrorCode::kProtocol,
                   "the supervisor is ready, but worker " + planned.name + " has no " +
                       (made[i].path.channel == nullptr ? "data path" : "pulse")};
    }
    client::NewWorker worker;
    worker.name = planned.name;
    worker.path = std::move(made[i].path);
    worker.pulse = std::move(made[i].pulse);
    worker.policy = {planned.slice_tokens, planned.window, planned.is_measured};
    worker.request_dtype = planned_dtype(planned.request_dtype).value();
    worker.reply_dtype = planned_dtype(planned.reply_dtype).value();
    auto added = client_.add_worker(std::move(worker));
    if (!added.ok()) return std::move(added).error().with("the supervisor's plan");
  }
  for (const wire::PlannedLayer& layer : plan_.layers) {
    Status defined = client_.define_layer(plan_.layer_plan(layer));
    if (!defined.ok()) return std::move(defined).error().with("the supervisor's plan");
  }
  return ok();
}

}  // namespace dflash::c_interface
