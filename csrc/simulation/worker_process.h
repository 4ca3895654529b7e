// A simulated worker process: the real worker, its session, its pulses, and how it dies.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "simulation/experts.h"
#include "simulation/scheduler.h"
#include "simulation/simulated_link.h"
#include "worker/expert_worker.h"
#include "worker/pulse.h"

namespace dflash::simulation {

class World;

// A data path that the host asks a worker to serve. With a pulse it is a new session, without one
// only the path changes.
struct PathOrder {
  std::shared_ptr<SimulatedLink> link;
  OwnedFd pulse;
  std::shared_ptr<bool> is_pulse_closed;  // set when the worker closes it
  std::function<void()> on_accepted;
};

class WorkerProcess {
 public:
  // Starts it with the shards that it holds.
  WorkerProcess(World& world, uint32_t worker);

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
  ExpertsState& experts() { return experts_; }

 private:
  void run();
  void serve();
  void obey(PathOrder order);
  void send_pulses(uint64_t session);
  void close_pulse();

  World& world_;
  const uint32_t worker_;
  ExpertsState experts_;
  std::unique_ptr<worker::ExpertWorker> expert_worker_;
  std::shared_ptr<SimulatedLink> link_;  // of the path that is served, or was last
  std::shared_ptr<SimulatedLink> next_link_;
  std::shared_ptr<worker::PulseSender> pulse_;
  std::shared_ptr<bool> is_pulse_closed_;
  uint64_t num_sessions_ = 0;
  bool is_serving_ = false, is_losing_pulses_ = false;
  std::vector<PathOrder> waiting_orders_;  // that came while the process was frozen
  std::unique_ptr<Task> task_;
};

}  // namespace dflash::simulation
