// A client and its worker processes: who lives, who is brought back, and what is left in the end.
// Worker i and worker i + 1 hold shard i, and the last worker's neighbour is the first.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "client/expert_client.h"
#include "failover/worker_process.h"

namespace dflash::failover {

inline constexpr uint32_t kNumWorkers = 2;  // and as many shards

class Fleet {
 public:
  // Starts all workers over this transport. Errors: those of the system.
  static Result<std::unique_ptr<Fleet>> start(const std::string& transport,
                                              const client::ClientOptions& options);
  // Destroys the client, and kills and reaps every process that is left.
  ~Fleet();

  client::ExpertClient& client() { return client_; }
  Orders& orders(uint32_t worker) { return orders_[worker]; }
  pid_t pid(uint32_t worker) const { return pids_[worker]; }
  bool is_alive(uint32_t worker) const { return pids_[worker] != 0; }
  bool are_all_alive() const;

  void signal(uint32_t worker, int sent) const;
  // Reaps the worker if its process has ended; returns whether it has none any more.
  bool try_reap(uint32_t worker);
  // Kills what is left of the worker and reaps it.
  void kill(uint32_t worker);
  // Tells the client that the worker is gone, starts another process and hands it over.
  Status revive(uint32_t worker);
  // Gives the shards of `worker` no other holder, and says that it is brought back; or undoes both.
  Status set_lone(uint32_t worker, bool is_lone);

 private:
  Fleet(std::unique_ptr<Weights> weights, SharedOrders orders, const transport::TransportKind& kind,
        const client::ClientOptions& options);
  Result<Started> start_one(uint32_t worker);
  Status add_all();
  void reaped(uint32_t worker) { pids_[worker] = 0; }

  const std::unique_ptr<Weights> weights_;
  SharedOrders orders_;
  const transport::TransportKind& kind_;
  uint64_t next_generation_ = 1;
  std::vector<pid_t> pids_;  // [num_workers]; 0 where there is no process
  client::ExpertClient client_;
};

}  // namespace dflash::failover
