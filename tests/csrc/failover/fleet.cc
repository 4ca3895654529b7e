// SPDX-License-Identifier: Apache-2.0
#include "failover/fleet.h"

#include <signal.h>
#include <sys/wait.h>

namespace dflash::failover {
namespace {

// Rows of a slice: 256 tokens make two, of which one alone fills most of a socket.
constexpr uint32_t kSliceTokens = 128, kWindow = 2;

transport::SlotGeometry geometry() {
  // A row, its pairs and a message's head fit with room to spare.
  const uint64_t slot = kSliceTokens * (kWidth * sizeof(float) + 64) + 4096;
  return {kWindow + 1, slot, slot};
}

}  // namespace

Fleet::Fleet(std::unique_ptr<Weights> weights, SharedOrders orders,
             const transport::TransportKind& kind, const client::ClientOptions& options)
    : weights_(std::move(weights)),
      orders_(std::move(orders)),
      kind_(kind),
      pids_(kNumWorkers, 0),
      client_(options) {}

Fleet::~Fleet() {
  for (uint32_t worker = 0; worker < kNumWorkers; ++worker) kill(worker);
}

Result<std::unique_ptr<Fleet>> Fleet::start(const std::string& transport,
                                            const client::ClientOptions& options) {
  auto kind = transport::find_kind(transport::transport_kinds(), transport);
  if (!kind.ok()) return std::move(kind).error();
  auto weights = Weights::make(kNumWorkers);
  if (!weights.ok()) return std::move(weights).error();
  auto orders = SharedOrders::make(kNumWorkers);
  if (!orders.ok()) return std::move(orders).error();
  std::unique_ptr<Fleet> fleet(
      new Fleet(std::move(weights).value(), std::move(orders).value(), *kind.value(), options));
  DFLASH_TRY(fleet->add_all());
  return fleet;
}

Status Fleet::add_all() {
  client::LayerPlan plan;
  plan.layer = kLayer;
  plan.name = "model.layers.3.mlp.experts";
  plan.in_size = plan.out_size = kWidth;
  plan.num_experts = kNumWorkers * kExpertsEach;
  for (uint32_t worker = 0; worker < kNumWorkers; ++worker) {
    auto started = start_one(worker);
    if (!started.ok()) return std::move(started).error();
    client::NewWorker added;
    added.name = std::string("w").append(std::to_string(worker));
    added.path = std::move(started.value().path);
    added.pulse = std::move(started.value().pulse);
    added.policy = {kSliceTokens, kWindow};
    auto index = client_.add_worker(std::move(added));
    if (!index.ok()) return std::move(index).error();
    client::ShardPlace place{worker, worker, kFirstFingerprint + worker, {}};
    for (uint32_t id = 0; id < kExpertsEach; ++id)
      place.experts.push_back(worker * kExpertsEach + id);
    plan.shards.push_back(std::move(place));
  }
  DFLASH_TRY(client_.define_layer(plan));
  for (uint32_t worker = 0; worker < kNumWorkers; ++worker) DFLASH_TRY(set_lone(worker, false));
  return ok();
}

Result<Started> Fleet::start_one(uint32_t worker) {
  auto started = start_worker(*weights_, kind_, geometry(), next_generation_++, orders_[worker]);
  if (started.ok()) pids_[worker] = started.value().pid;
  return started;
}

bool Fleet::are_all_alive() const {
  for (const pid_t pid : pids_) {
    if (pid == 0) return false;
  }
  return true;
}

void Fleet::signal(uint32_t worker, int sent) const {
  if (is_alive(worker)) ::kill(pids_[worker], sent);
}

bool Fleet::try_reap(uint32_t worker) {
  if (is_alive(worker) && ::waitpid(pids_[worker], nullptr, WNOHANG) == pids_[worker])
    reaped(worker);
  return !is_alive(worker);
}

void Fleet::kill(uint32_t worker) {
  if (!is_alive(worker)) return;
  signal(worker, SIGKILL);
  // No process outlives SIGKILL, a stopped one neither.
  while (::waitpid(pids_[worker], nullptr, 0) < 0 && errno == EINTR) {
  }
  reaped(worker);
}

Status Fleet::revive(uint32_t worker) {
  kill(worker);
  client_.mark_lost(worker, "its process ended");
  auto started = start_one(worker);
  if (!started.ok()) return std::move(started).error();
  return client_.replace_worker(worker, std::move(started.value().path),
                                std::move(started.value().pulse));
}

Status Fleet::set_lone(uint32_t worker, bool is_lone) {
  // Shards of other workers keep both holders, so that only this worker's own one is at stake.
  std::vector<uint32_t> holders{worker};
  if (!is_lone) holders.push_back((worker + 1) % kNumWorkers);
  DFLASH_TRY(client_.set_remedy(worker, is_lone));
  return client_.set_holders(kLayer, worker, holders);
}

}  // namespace dflash::failover
