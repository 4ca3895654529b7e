// Breaks what is one host's own at random times, and with the first host's the workers' processes,
// as the options say, until the time for it is over.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "simulation/world.h"

namespace dflash::simulation {

class Injector {
 public:
  Injector(World& world, uint32_t host)
      : world_(world),
        host_(world.hosts[host]),
        options_(world.options.hosts[host]),
        index_(host),
        random_(world.random.split()) {}

  void start();
  // Whether nothing more will break, and nothing of this host is broken.
  bool is_quiet() const;

  // What the host's task does at its next turn, because it is the host that does it: how many calls
  // it gives up, and which workers it removes or adds again.
  uint32_t take_abandons() { return std::exchange(num_abandons_, 0); }
  struct Change {
    uint32_t worker;
    bool is_removal;
  };
  std::vector<Change> take_changes() { return std::exchange(changes_, {}); }
  // Whether its process dies.
  bool take_death() { return std::exchange(dies_, false); }
  // Whether it makes as many calls as it can at present.
  bool is_flooding() const { return is_flooding_; }
  // For how long it computes something else.
  int64_t take_busy_ns() { return std::exchange(busy_ns_, 0); }
  // Called when the host's process goes on after it was stopped, with how long that was.
  std::function<void(int64_t)> on_continued = [](int64_t) {};

 private:
  void plan_next();
  void inject(uint32_t worker, SimulatedFault kind);
  void kill(uint32_t worker, SimulatedFault kind, int64_t duration_ns);
  void remove(uint32_t worker);
  void freeze(uint32_t worker);
  void hang(uint32_t worker);
  void mute(uint32_t worker);
  void get_stuck(uint32_t worker);
  void stop_host();
  void flood();
  void refuse(uint32_t worker, SimulatedFault kind);
  void cut(uint32_t worker, SimulatedFault kind);
  void damage(uint32_t worker, SimulatedFault kind);
  // Ends a fault once `is_over` says so, at which it is asked every 50 ms.
  void end_once(uint32_t worker, SimulatedFault kind, std::function<bool()> is_over);
  // Undoes a fault after its time, if the same process is still alive.
  void undo_after(uint32_t worker, SimulatedFault kind, int64_t duration_ns,
                  std::function<void(WorkerProcess&)> undo);

  WorkerOfHost& link_to(uint32_t worker) { return host_.workers[worker]; }
  // The present path to a worker.
  WorkerSession& session(uint32_t worker) {
    return world_.workers[worker].process().session(index_);
  }
  void begin(uint32_t worker, SimulatedFault kind, int64_t duration_ns) {
    world_.begin_fault(index_, worker, kind, duration_ns);
  }
  void end(uint32_t worker, SimulatedFault kind) { world_.end_fault(index_, worker, kind); }

  World& world_;
  HostRecord& host_;
  const SimulatedHostOptions& options_;
  const uint32_t index_;
  Random random_;
  int64_t end_ns_ = 0;
  bool is_over_ = false;
  bool is_stopped_ = false;  // the host's process
  bool is_flooding_ = false, dies_ = false;
  int64_t busy_ns_ = 0;
  uint32_t num_abandons_ = 0;
  uint32_t num_removed_ = 0;  // workers that will be added again
  std::vector<Change> changes_;
};

}  // namespace dflash::simulation
