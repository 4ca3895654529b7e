// A simulated worker process: real workers, one for each host's session, with its pulses, and how
// the process dies. All sessions compute with the same shards by turns.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "simulation/experts.h"
#include "simulation/scheduler.h"
#include "simulation/simulated_link.h"
#include "worker/expert_worker.h"
#include "worker/pulse.h"

namespace dflash::simulation {

class World;

// A data path that a host asks a worker to serve. With a pulse it is a new session, without one
// only the path changes.
struct PathOrder {
  std::shared_ptr<SimulatedLink> link;
  OwnedFd pulse;
  std::shared_ptr<bool> is_pulse_closed;  // set when the worker closes it
  std::function<void()> on_accepted;
};

using Shards = std::vector<std::pair<uint32_t, std::shared_ptr<store::ResidentShard>>>;

// What a process has of one host, in a thread of its own.
class WorkerSession {
 public:
  WorkerSession(World& world, uint32_t host, uint32_t worker, const Shards& shards);

  // The host's control connection brings an order, which a frozen process obeys later and a dead
  // one never.
  void accept(PathOrder order);
  void kill(bool keeps_sent);
  void freeze() { task_->freeze(); }
  void thaw();
  void set_losing_pulses(bool is_losing) { is_losing_pulses_ = is_losing; }

  bool is_alive() const { return !task_->is_over() && !task_->is_killed(); }
  bool is_frozen() const { return task_->is_frozen(); }
  bool is_over() const { return task_->is_over(); }
  SimulatedLink* link() const { return link_.get(); }
  std::shared_ptr<SimulatedLink> shared_link() const { return link_; }

  // A computation of so many rows begins in the process, for the session whose task runs. Returns
  // what this session suffers by it that it must not.
  std::optional<std::string> note_computation(uint32_t num_rows, size_t num_experts,
                                              int64_t longest_ns);

 private:
  void run();
  void serve();
  void obey(PathOrder order);
  void send_pulses(uint64_t session);
  void close_pulse();
  Network& network() const;

  World& world_;
  const uint32_t host_, worker_;
  std::unique_ptr<worker::ExpertWorker> expert_worker_;
  std::shared_ptr<SimulatedLink> link_;  // of the path that is served, or was last
  std::shared_ptr<SimulatedLink> next_link_;
  std::shared_ptr<worker::PulseSender> pulse_;
  std::shared_ptr<bool> is_pulse_closed_;
  uint64_t num_sessions_ = 0;
  bool is_serving_ = false, is_losing_pulses_ = false;
  std::vector<PathOrder> waiting_orders_;  // that came while the process was frozen
  // Of the piece for which the session waits: what tells it from others, and since when
  // computations of other sessions have begun meanwhile.
  int64_t waits_since_ns_ = 0;
  uint64_t batches_before_ = 0;
  int64_t others_since_ns_ = 0;  // 0 while none has begun
  std::unique_ptr<Task> task_;
};

class WorkerProcess {
 public:
  // Starts it with the shards that it holds.
  WorkerProcess(World& world, uint32_t worker);

  void kill(bool keeps_sent);
  void freeze();
  void thaw();
  void set_losing_pulses(bool is_losing);

  // All of its sessions live and die together.
  bool is_alive() const { return sessions_.front()->is_alive(); }
  bool is_frozen() const { return sessions_.front()->is_frozen(); }
  bool is_over() const;
  WorkerSession& session(uint32_t host) { return *sessions_[host]; }
  ExpertsState& experts() { return experts_; }

 private:
  ExpertsState experts_;
  std::vector<std::unique_ptr<WorkerSession>> sessions_;  // by host
};

}  // namespace dflash::simulation
