// What stands in for the host's supervisor: it renews worn data paths and brings lost workers back,
// as the runtime does over control connections. It runs on the host's task.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "client/expert_client.h"
#include "simulation/world.h"

namespace dflash::simulation {

class Supervisor {
 public:
  Supervisor(World& world, client::ExpertClient& client) : world_(world), client_(client) {
    members_.resize(world.members.size());
  }

  // Makes the first path of a worker, which is served at once, and adds it to the client.
  void add_worker(uint32_t worker);
  // To be called every few milliseconds.
  void look();
  // Whether every worker is attached and has all its slots.
  bool is_whole() const;

 private:
  enum class State : uint8_t { kAttached, kRenewing, kLost, kConnecting };
  struct Path {
    std::shared_ptr<Link> link;
    OwnedFd pulse;  // the host's end; closed for a path that was only renewed
  };
  struct Tracked {
    State state = State::kAttached;
    uint64_t num_orders =
        0;  // numbers the orders, so that a late answer to a former one is ignored
    int64_t retry_at_ns = 0;
    std::unique_ptr<Path> accepted;  // by the worker, not yet taken by the client
  };

  void order(uint32_t worker, bool is_session);
  void take_accepted(uint32_t worker);
  void note_lost();
  void lose(uint32_t worker);
  std::shared_ptr<Link> make_link(uint32_t worker);
  client::NewPath new_path(const std::shared_ptr<Link>& link);

  World& world_;
  client::ExpertClient& client_;
  std::vector<Tracked> members_;
  int64_t next_reports_ns_ = 0;
};

}  // namespace dflash::simulation
