// What stands behind the C interface's client: the host's client (client/), the connection to the
// supervisor, and a thread of its own, the keeper, which serves that connection. Its sources are
// session.cc (calls and counters), opening.cc (taking the hand-over) and keeper.cc (the thread).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/owned_fd.h"
#include "base/result.h"
#include "base/token_batch.h"
#include "c_interface/connection.h"
#include "c_interface/path_exchange.h"
#include "c_interface/plan.h"
#include "client/expert_client.h"

namespace dflash::c_interface {

// Counters reach the supervisor at most this often.
inline constexpr int64_t kCountPeriodNs = 500'000'000;
// A supervisor that takes no message for so long stands still.
inline constexpr int64_t kSendPatienceNs = 5'000'000'000;
// The start's own limit is the supervisor's (ipc.start_timeout_s), which hangs up when it is over.
// This one is for a supervisor that stands still.
inline constexpr int64_t kOpenPatienceNs = 600'000'000'000;

class Session;

// A submitted call that its owner has not abandoned.
class OpenCall {
 public:
  explicit OpenCall(Session& owner) : session(owner) {}
  Session& session;

 private:
  friend class Session;
  client::CallPtr
      call_;  // set before submit() returns it; until then the session's mutex guards it
  bool is_booked_ = false;  // whether its end is in the totals; the session's mutex guards it
};

// Any thread may call anything but the destructor, within which no other may be here.
class Session {
 public:
  // Takes a hand-over. Errors: those of the connection, the supervisor's refusal (kWorkerFailed),
  // an unusable plan or path.
  static Result<std::unique_ptr<Session>> open(const SupervisorAddress& supervisor);
  // Ends all calls, sends the last counters, and closes the data paths.
  ~Session();

  const Plan& plan() const { return plan_; }
  // Whether this process opened it, not one that this was forked from. No other function may be
  // called in a forked child, where the keeper does not exist, and the session must be leaked.
  bool is_ours() const { return ::getpid() == owner_; }

  // Errors: those of ExpertClient::submit, kClosed.
  Result<OpenCall*> submit(const TokenBatch& batch, uint32_t layer);
  // Returns whether the call is done.
  bool wait(OpenCall& call, Deadline deadline);
  // Returns how a call ended; it must be done.
  Status outcome(OpenCall& call);
  // Ends the call if it is not done, and frees it.
  void abandon(OpenCall* call);
  wire::Counted count() const;
  void report_tensor(const std::string& name, const std::string& reason);

  // Has the keeper send the last counters, and waits for that for at most kExitPatienceMs. It only
  // touches descriptors and an atomic, so that a signal handler which ends the process may come
  // here.
  void send_last_counters();
  static constexpr int kExitPatienceMs = 300;

 private:
  Session(std::unique_ptr<Connection> connection, Plan plan, PathExchange paths);

  // opening.cc
  Status take_paths(std::vector<MadePath> made);
  Status start_keeper();

  // session.cc
  static void ring(const OwnedFd& bell);
  Error closed_or(Error error) const;
  void book(OpenCall& call);
  void note_loss(const Error& error);
  void snapshot();
  void end_all(const std::string& reason);
  Status send(const wire::HandoverMessage& message);

  // keeper.cc; the keeper's thread runs all of these
  void keep();
  Status serve_connection();
  Status handle(Received received);
  Status renew(MadePath made);
  Status lose(uint32_t worker, const std::string& reason);
  Status report_losses();
  Status request_paths();
  Status send_counters();
  void send_last();

  const pid_t owner_;
  const Plan plan_;
  std::unique_ptr<Connection> connection_;
  client::ExpertClient client_;

  // -- calls --
  mutable std::mutex mutex_;  // guards what follows until the next group
  std::unordered_map<OpenCall*, std::unique_ptr<OpenCall>> calls_;
  std::optional<std::string> closed_reason_;  // why no call can end well any more
  uint64_t num_ended_ = 0, num_failed_ = 0, call_ns_ = 0;
  uint64_t num_open_ = 0;           // calls that are not booked
  wire::Counted counted_;           // as they were at the last snapshot
  uint64_t num_counted_ended_ = 0;  // num_ended_ of that snapshot
  int64_t last_ended_ns_ = 0, next_snapshot_ns_ = 0;

  // -- between callers and the keeper --
  // Relaxed: the bell orders them.
  std::atomic<bool> is_stopping_ = false, is_exiting_ = false;
  std::atomic<bool> may_have_losses_ = false;  // whether a call ended because a worker is lost
  OwnedFd bell_;                               // an eventfd that wakes the keeper
  OwnedFd exit_bell_;  // an eventfd on which it says that it sent the last counters

  // -- the keeper's own --
  PathExchange paths_;
  std::vector<bool> is_loss_known_;  // [num_workers], whether the supervisor knows that it is lost
  wire::Counted sent_;
  std::thread keeper_;
};

}  // namespace dflash::c_interface
