// The hosts' tasks, and the two phases.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulation.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "simulation/injector.h"
#include "simulation/simulated_keeper.h"
#include "simulation/world.h"

namespace dflash::simulation {
namespace {

// The longest time between two looks at what happened beside the calls.
constexpr int64_t kLookNs = 10'000'000;
constexpr int64_t kLongestFaultNs = 3'600'000'000'000;
// Once nothing is broken, everything must be whole again within this time ...
constexpr int64_t kHealNs = 10'000'000'000;
// ... but not before a host that was away has seen whose processes have ended meanwhile ...
constexpr int64_t kSeenNs = 200'000'000;
// ... and so many calls must succeed, one after another.
constexpr uint64_t kFinalCalls = 100;
// A killed session's waits end within this time.
constexpr int64_t kEndNs = 60'000'000'000;
// A host that floods makes so many calls at a time, with so much time between two. Eight of the
// largest calls keep one worker busy for half a second.
constexpr size_t kFloodCalls = 8;
constexpr int64_t kFloodThinkNs = 100'000;
// The budget of second requests for slices that are merely slow, as the client's options have it.
constexpr double kHedges = 10, kHedgeShare = 0.05;

client::LayerPlan layer_of(const Options& options) {
  client::LayerPlan plan;
  plan.layer = 0;
  plan.name = "layers.0.experts";
  plan.in_size = plan.out_size = kRowWidth;
  plan.num_experts = options.num_experts;
  for (uint32_t shard = 0; shard < options.shards.size(); ++shard) {
    plan.shards.push_back(
        {shard, options.holders[shard].front(), shard + 1, options.shards[shard]});
  }
  return plan;
}

// What dies with a host's process.
struct HostProcess {
  HostProcess(World& world, uint32_t host, std::unique_ptr<Membership> members)
      : membership(std::move(members)),
        client(std::in_place, client::ClientOptions(world.options.call_timeout_ns,
                                                    world.options.stall_timeout_ns)),
        keeper(world, host, *client, *membership) {}

  // Its data paths and pulses are closed. What it has asked others for may still come.
  void die() {
    keeper.end();
    client.reset();
  }

  std::unique_ptr<Membership> membership;
  std::optional<client::ExpertClient> client;
  SimulatedKeeper keeper;
};

class SimulatedHost {
 public:
  using StartProcess = std::function<std::unique_ptr<HostProcess>()>;
  // `are_all_quiet` says whether nothing of any host breaks any more.
  SimulatedHost(World& world, uint32_t host, StartProcess start_process,
                std::function<bool()> are_all_quiet)
      : world_(world),
        record_(world.hosts[host]),
        host_(host),
        start_process_(std::move(start_process)),
        are_all_quiet_(std::move(are_all_quiet)),
        injector_(world, host),
        process_(start_process_()),
        caller_(world, host, *process_->client),
        random_(world.random.split()) {}

  void run() {
    for (uint32_t worker = 0; worker < world_.workers.size(); ++worker) {
      if (host_ == 0) world_.start_process(worker);
      process_->keeper.add_worker(worker);
    }
    name_layer();
    injector_.on_continued = [this](int64_t ns) {
      if (process_ != nullptr) process_->keeper.excuse(ns);
    };
    injector_.start();
    const Deadline quiet_by = Deadline::after_ns(world_.options.duration_ns + kLongestFaultNs);
    while (!are_all_quiet_()) {
      if (quiet_by.has_passed()) {
        world_.violate("a fault that ends with the loss of its worker has not ended for an hour");
        break;
      }
      turn();
      change_workers();
      if (const int64_t busy_ns = injector_.take_busy_ns(); busy_ns > 0) compute(busy_ns);
      for (uint32_t count = injector_.take_abandons(); count > 0; --count) caller_.abandon_one();
      if (injector_.take_death()) die();
    }
    change_workers();
    world_.record(JournalEvent::kPhase);
    heal();
    while (caller_.num_under_way() > 0) caller_.wait(tick());
    caller_.check_ended_outputs(true);
    check_balance();
    is_over_ = true;
  }

  bool is_over() const { return is_over_; }
  bool is_quiet() const { return injector_.is_quiet(); }
  const CallCounts& calls() const { return caller_.counts(); }

 private:
  Deadline tick() const { return Deadline::after_ns(kLookNs); }

  void name_layer() {
    check(process_->client->define_layer(layer_of(world_.options)).ok(), "the client takes a plan");
    process_->keeper.name_holders(!world_.options.joins_late);
  }

  // Something else, in which nobody looks at what arrives.
  void compute(int64_t ns) {
    const int64_t began = world_.scheduler.now_ns(), away_ns = record_.away_ns;
    const int64_t until = began + ns;
    while (world_.scheduler.now_ns() < until) world_.scheduler.running()->sleep_until(until);
    process_->keeper.excuse(world_.scheduler.now_ns() - began - (record_.away_ns - away_ns));
    record_.away_ns = away_ns + world_.scheduler.now_ns() - began;
  }

  // The host's process is killed, and another one takes its place, which knows of nothing. An
  // interpreter is asked for it, outside of this task. What the former one had on its way is kept
  // until the end, because events refer to it.
  void die() {
    ++world_.num_faults[static_cast<size_t>(SimulatedFault::kDie)];
    world_.record(JournalEvent::kFault, world_.label(host_, 0),
                  static_cast<uint64_t>(SimulatedFault::kDie),
                  static_cast<uint64_t>(world_.options.restart_ns / 1'000'000));
    while (caller_.num_under_way() > 0) caller_.abandon_one();
    count_requests();
    for (uint32_t worker = 0; worker < world_.workers.size(); ++worker)
      world_.set_attached(host_, worker, false);
    process_->die();
    former_.push_back(std::move(process_));
    record_.closed_before.clear();
    world_.scheduler.after(world_.options.restart_ns, [this] {
      process_ = start_process_();
      record_.task->wake();
    });
    while (process_ == nullptr)
      world_.scheduler.running()->sleep_until(world_.scheduler.now_ns() + kLookNs);
    caller_.change_client(*process_->client);
    for (uint32_t worker = 0; worker < world_.workers.size(); ++worker)
      process_->keeper.add_lost_worker(worker);
    name_layer();
  }

  // One turn of the host: looks after the workers, submits a call if one is due, and waits for
  // answers, or sleeps until the next look where no call is under way.
  void turn() {
    process_->keeper.look();
    const SimulatedHostOptions& options = world_.options.hosts[host_];
    const bool floods = injector_.is_flooding();
    const size_t most_calls = floods ? kFloodCalls : options.num_concurrent_calls;
    const int64_t think_ns = floods ? kFloodThinkNs : options.think_ns;
    const int64_t now = world_.scheduler.now_ns();
    if (now >= next_call_ns_ && caller_.num_under_way() < most_calls) {
      caller_.submit();
      next_call_ns_ =
          now + static_cast<int64_t>(-std::log(1 - random_.unit()) * static_cast<double>(think_ns));
    }
    const int64_t until =
        next_call_ns_ > now ? std::min(next_call_ns_, now + kLookNs) : now + kLookNs;
    if (caller_.num_under_way() > 0) {
      caller_.wait(Deadline::at_ns(until));
    } else {
      world_.scheduler.running()->sleep_until(until);
    }
  }

  void change_workers() {
    for (const Injector::Change& change : injector_.take_changes()) {
      if (change.is_removal) {
        process_->keeper.remove(change.worker);
      } else {
        process_->keeper.want_back(change.worker);
      }
    }
  }

  void heal() {
    const Deadline whole_by = Deadline::after_ns(kHealNs), seen_by = Deadline::after_ns(kSeenNs);
    while (!seen_by.has_passed() || !process_->keeper.is_whole()) {
      if (whole_by.has_passed())
        return world_.violate("a worker or its slots were missing 10 s after the last fault ended");
      turn();
    }
    // Calls of the time before may still fail.
    while (caller_.num_under_way() > 0) caller_.wait(tick());
    const CallCounts before = caller_.counts();
    while (caller_.counts().calls < before.calls + kFinalCalls) turn();
    while (caller_.num_under_way() > 0) caller_.wait(tick());
    const uint64_t succeeded = caller_.counts().succeeded - before.succeeded;
    if (succeeded != caller_.counts().calls - before.calls)
      world_.violate("of " + std::to_string(caller_.counts().calls - before.calls) +
                     " calls after everything had healed " + std::to_string(succeeded) +
                     " succeeded");
  }

  // Adds up what the present client has counted.
  void count_requests() {
    has_suspected_ = has_suspected_ || process_->keeper.has_suspected();
    ++num_clients_;
    for (const client::CountersOf& one : process_->client->counters()) {
      num_hedges_ += one.counters.hedges;
      counted_.num_requests += one.counters.calls + one.counters.hedges;
      counted_.request_bytes += one.counters.request_bytes + one.counters.hedge_request_bytes;
    }
  }

  // What the clients counted is what travelled.
  void check_balance() {
    count_requests();
    const LinkCounts& sent = record_.sent;
    if (counted_.num_requests != sent.num_requests || counted_.request_bytes != sent.request_bytes)
      world_.violate("the client counts " + std::to_string(counted_.num_requests) +
                     " requests, its data paths carried " + std::to_string(sent.num_requests));
    // Second requests for workers that are suspected to hang are in no budget.
    const double most =
        kHedges * num_clients_ + kHedgeShare * static_cast<double>(counted_.num_requests);
    if (!has_suspected_ && static_cast<double>(num_hedges_) > most)
      world_.violate(std::to_string(num_hedges_) + " second requests of " +
                     std::to_string(counted_.num_requests) + " are over their budget");
  }

  World& world_;
  HostRecord& record_;
  const uint32_t host_;
  const StartProcess start_process_;
  const std::function<bool()> are_all_quiet_;
  Injector injector_;
  std::unique_ptr<HostProcess> process_;
  std::vector<std::unique_ptr<HostProcess>> former_;
  Caller caller_;
  Random random_;
  int64_t next_call_ns_ = 0;
  LinkCounts counted_;
  uint64_t num_hedges_ = 0;
  int num_clients_ = 0;
  bool has_suspected_ = false;
  bool is_over_ = false;
};

// Ends all processes, so that their code returns and gives back what it holds.
void end_processes(World& world) {
  const int64_t until = world.scheduler.now_ns() + kEndNs;
  world.scheduler.run([&world, until] {
    check(world.scheduler.now_ns() < until, "a session of a killed worker waits for ever");
    bool are_over = true;
    for (const SimulatedWorker& simulated : world.workers) {
      for (const auto& process : simulated.processes) {
        process->kill(false);
        are_over = are_over && process->is_over();
      }
    }
    return are_over;
  });
}

// What the workers' sessions have computed by turns.
store::BatchCounts count_batches(World& world) {
  store::BatchCounts sum;
  for (const SimulatedWorker& simulated : world.workers) {
    for (const auto& process : simulated.processes) {
      const store::BatchCounts counts = process->experts().turns->counts();
      sum.batches += counts.batches;
      sum.rows += counts.rows;
      sum.sessions += counts.sessions;
    }
  }
  return sum;
}

}  // namespace

Report simulate(uint64_t seed, int64_t duration_ns, const MakeMembership& make_membership) {
  Report report;
  World world(seed, Options::of(seed, duration_ns));
  std::vector<std::unique_ptr<SimulatedHost>> hosts;
  const auto are_all = [&hosts](bool (SimulatedHost::*claim)() const) {
    return std::ranges::all_of(hosts, [claim](const auto& host) { return (*host.*claim)(); });
  };
  std::vector<std::unique_ptr<Task>> tasks;
  for (uint32_t index = 0; index < world.hosts.size(); ++index) {
    hosts.push_back(std::make_unique<SimulatedHost>(
        world, index,
        [&world, &make_membership, seed, index] {
          return std::make_unique<HostProcess>(world, index, make_membership(seed, world.options));
        },
        [&are_all] { return are_all(&SimulatedHost::is_quiet); }));
    tasks.push_back(world.scheduler.spawn([host = hosts.back().get()] { host->run(); }));
    world.hosts[index].task = tasks.back().get();
  }
  const bool is_over = world.scheduler.run([&] { return are_all(&SimulatedHost::is_over); });
  check(is_over, "a simulation stands still although its hosts are not done");
  report.virtual_ns = world.scheduler.now_ns();
  report.num_hosts = static_cast<uint32_t>(hosts.size());
  for (const auto& host : hosts) report.calls.add(host->calls());
  report.event_hash = world.journal.hash();
  report.num_events = world.journal.num_events();
  report.faults = world.num_faults;
  report.violations = world.violations;
  report.options = world.options.lines();
  report.last_events =
      world.violations.empty() ? world.journal.last_events() : world.events_before_violation;
  world.scheduler.run([&tasks] {
    return std::ranges::all_of(tasks, [](const auto& task) { return task->is_over(); });
  });
  report.batches = count_batches(world);
  end_processes(world);
  hosts.clear();
  world.scheduler.drop_events();
  return report;
}

}  // namespace dflash::simulation
