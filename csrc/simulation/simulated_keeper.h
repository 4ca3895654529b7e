// What stands in for the thread that keeps the runtime's workers (holders/worker_keeper.py): it
// tells the state machine of each worker what happens to it, carries out what that orders, and
// renews worn data paths. Starting, dialling, loading and ending take virtual time.
//
// The state machines are asked outside of simulated threads (membership.h), and the client is told
// by the host's task alone, so that events and orders wait for each other as they do between real
// threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "client/expert_client.h"
#include "simulation/membership.h"
#include "simulation/world.h"

namespace dflash::simulation {

class SimulatedKeeper {
 public:
  // Called outside of simulated threads: every worker's machine is told that it is there. Client
  // and membership must outlive this, or its end().
  SimulatedKeeper(World& world, uint32_t host, client::ExpertClient& client,
                  Membership& membership);

  // -- on the host's task --
  // Makes the first path of a worker, which is served at once, and adds it to the client.
  void add_worker(uint32_t worker);
  // Adds it as one that is lost, which the worker's machine has to reach first.
  void add_lost_worker(uint32_t worker);
  // Tells the client who holds the shards, with the host's own copy or without.
  void name_holders(bool with_last_resort);
  // To be called every few milliseconds.
  void look();
  // Removes a worker; it is added again once it is gone and somebody wants it back.
  void remove(uint32_t worker);
  void want_back(uint32_t worker);
  // The host was away for so long, in which no worker could answer it.
  void excuse(int64_t ns);
  // Whether every worker is attached and has all its slots, and nothing is about to change that.
  bool is_whole() const;
  // The host has died: whatever is under way comes to nothing, and nothing is called any more.
  void end();
  // Whether any worker was ever suspected to hang, which costs second requests without a budget.
  bool has_suspected() const { return has_suspected_; }

 private:
  struct Path {
    std::shared_ptr<SimulatedLink> link;
    OwnedFd pulse;  // the host's end; closed for a path that was only renewed
  };
  struct Tracked {
    MemberDecision decided;           // the last one
    std::vector<MemberOrder> orders;  // not carried out yet
    bool is_attached = true;          // whether the client has it
    bool is_renewing = false, is_joining = false;
    bool is_wanted = true;   // whether it is added again when it is gone
    uint64_t num_steps = 0;  // numbers what is under way, so that late answers are ignored
    int64_t give_up_ns = 0;  // when the step under way is given up
    uint64_t step_attempt = 0;
    std::unique_ptr<Path> accepted;  // by the worker, not yet taken by the client
  };

  WorkerOfHost& link_to(uint32_t worker) { return world_.hosts[host_].workers[worker]; }
  Task& task() { return *world_.hosts[host_].task; }
  std::shared_ptr<SimulatedLink> add(uint32_t worker, PathOrder& order);
  void post(uint32_t worker, Happening what, uint64_t attempt, const char* reason = "",
            bool is_death = true);
  void handle(const MemberEvent& event);
  void take_events();
  bool is_last_holder(uint32_t worker) const;
  void make_last_resort();
  void note_ends();
  void carry_out(uint32_t worker, const MemberOrder& order);
  void start(uint32_t worker, uint64_t attempt);
  void start_process(uint32_t worker, uint64_t attempt);
  void dial(uint32_t worker, uint64_t attempt);
  void join(uint32_t worker, uint64_t attempt);
  void end(uint32_t worker, uint64_t attempt);
  void drain(uint32_t worker, uint64_t attempt);
  void fail(uint32_t worker, Happening what, const char* reason, bool is_death);
  void detach(uint32_t worker, const char* reason);
  void send_path(uint32_t worker, bool is_session);
  void take_accepted(uint32_t worker);
  void travel(uint32_t worker, transport::Side from, std::function<void()> action);
  bool is_current(uint32_t worker, uint64_t step) const {
    return members_[worker].num_steps == step;
  }
  std::shared_ptr<SimulatedLink> make_link(uint32_t worker);
  client::NewPath new_path(const std::shared_ptr<SimulatedLink>& link);

  World& world_;
  const uint32_t host_;
  client::ExpertClient& client_;
  Membership& membership_;
  bool is_over_ = false;
  int num_posted_ = 0;  // events on their way to the membership
  Random random_;
  std::vector<Tracked> members_;  // the host's own copy, which comes last, is none of them
  bool has_suspected_ = false;
  bool is_last_resort_missing_;
  int64_t last_resort_joins_ns_ = 0;  // when it has been made; 0 where it is not being made
};

}  // namespace dflash::simulation
