// The host's task, and the two phases.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/simulation.h"

#include <cmath>
#include <memory>

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
// ... and so many calls must succeed, one after another.
constexpr uint64_t kFinalCalls = 100;
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

class SimulatedHost {
 public:
  SimulatedHost(World& world, Membership& membership)
      : world_(world),
        client_(
            client::ClientOptions(world.options.call_timeout_ns, world.options.stall_timeout_ns)),
        injector_(world),
        keeper_(world, client_, membership),
        caller_(world, client_),
        random_(world.random.split()) {}

  void run() {
    for (uint32_t worker = 0; worker < world_.workers.size(); ++worker) {
      world_.start_process(worker);
      keeper_.add_worker(worker);
    }
    check(client_.define_layer(layer_of(world_.options)).ok(), "the client takes a plan");
    keeper_.name_holders(!world_.options.joins_late);
    injector_.on_continued = [this](int64_t ns) { keeper_.excuse(ns); };
    injector_.start();
    const Deadline quiet_by = Deadline::after_ns(world_.options.duration_ns + kLongestFaultNs);
    while (!injector_.is_quiet()) {
      if (quiet_by.has_passed()) {
        world_.violate("a fault that ends with the loss of its worker has not ended for an hour");
        break;
      }
      turn();
      change_workers();
      if (const int64_t busy_ns = injector_.take_busy_ns(); busy_ns > 0) compute(busy_ns);
      for (uint32_t count = injector_.take_abandons(); count > 0; --count) caller_.abandon_one();
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
  const CallCounts& calls() const { return caller_.counts(); }

 private:
  Deadline tick() const { return Deadline::after_ns(kLookNs); }

  // Something else, in which nobody looks at what arrives.
  void compute(int64_t ns) {
    const int64_t began = world_.scheduler.now_ns(), away_ns = world_.away_ns;
    const int64_t until = began + ns;
    while (world_.scheduler.now_ns() < until) world_.scheduler.running()->sleep_until(until);
    keeper_.excuse(world_.scheduler.now_ns() - began - (world_.away_ns - away_ns));
    world_.away_ns = away_ns + world_.scheduler.now_ns() - began;
  }

  // One turn of the host: looks after the workers, submits a call if one is due, and waits for
  // answers, or sleeps until the next look where no call is under way.
  void turn() {
    keeper_.look();
    const int64_t now = world_.scheduler.now_ns();
    if (now >= next_call_ns_ && caller_.num_under_way() < world_.options.num_concurrent_calls) {
      caller_.submit();
      next_call_ns_ = now + static_cast<int64_t>(-std::log(1 - random_.unit()) *
                                                 static_cast<double>(world_.options.think_ns));
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
        keeper_.remove(change.worker);
      } else {
        keeper_.want_back(change.worker);
      }
    }
  }

  void heal() {
    const Deadline whole_by = Deadline::after_ns(kHealNs);
    while (!keeper_.is_whole()) {
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

  // What the client counted is what travelled.
  void check_balance() {
    LinkCounts counted;
    uint64_t num_hedges = 0;
    for (const client::CountersOf& one : client_.counters()) {
      num_hedges += one.counters.hedges;
      counted.num_requests += one.counters.calls + one.counters.hedges;
      counted.request_bytes += one.counters.request_bytes + one.counters.hedge_request_bytes;
    }
    if (counted.num_requests != world_.sent.num_requests ||
        counted.request_bytes != world_.sent.request_bytes)
      world_.violate("the client counts " + std::to_string(counted.num_requests) +
                     " requests, its data paths carried " +
                     std::to_string(world_.sent.num_requests));
    // Second requests for workers that are suspected to hang are in no budget.
    const double most = kHedges + kHedgeShare * static_cast<double>(counted.num_requests);
    if (!keeper_.has_suspected() && static_cast<double>(num_hedges) > most)
      world_.violate(std::to_string(num_hedges) + " second requests of " +
                     std::to_string(counted.num_requests) + " are over their budget");
  }

  World& world_;
  client::ExpertClient client_;
  Injector injector_;
  SimulatedKeeper keeper_;
  Caller caller_;
  Random random_;
  int64_t next_call_ns_ = 0;
  bool is_over_ = false;
};

// Ends all processes, so that their code returns and gives back what it holds.
void end_processes(World& world) {
  world.scheduler.run([&world] {
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

}  // namespace

Report simulate(uint64_t seed, int64_t duration_ns, const MakeMembership& make_membership) {
  Report report;
  World world(seed, Options::of(seed, duration_ns));
  const auto membership = make_membership(seed, world.options);
  auto host = std::make_unique<SimulatedHost>(world, *membership);
  const auto task = world.scheduler.spawn([&host] { host->run(); });
  world.host = task.get();
  const bool is_over = world.scheduler.run([&host] { return host->is_over(); });
  check(is_over, "a simulation stands still although its host is not done");
  report.virtual_ns = world.scheduler.now_ns();
  report.calls = host->calls();
  report.event_hash = world.journal.hash();
  report.num_events = world.journal.num_events();
  report.faults = world.num_faults;
  report.violations = world.violations;
  report.options = world.options.lines();
  report.last_events =
      world.violations.empty() ? world.journal.last_events() : world.events_before_violation;
  world.scheduler.run([&task] { return task->is_over(); });
  end_processes(world);
  host.reset();
  world.scheduler.drop_events();
  return report;
}

}  // namespace dflash::simulation
