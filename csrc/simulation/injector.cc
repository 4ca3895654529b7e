// The faults by kind.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/injector.h"

#include <algorithm>
#include <cmath>

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kMs = 1'000'000, kS = 1'000'000'000;
// For how long a message may be waited for that is to be damaged.
constexpr int64_t kDamagePatienceNs = 2 * kS;

// How often it is looked whether a fault is over that ends with something else.
constexpr int64_t kLookNs = 50 * kMs;
// A worker that stands still is lost after the stall timeout. What is asked of it anew may begin
// that time once more.
constexpr int64_t kMostStalls = 2;

constexpr ErrorCode kRefusals[] = {ErrorCode::kInvalidArgument, ErrorCode::kProtocol,
                                   ErrorCode::kOutOfMemory, ErrorCode::kSystem};

}  // namespace

void Injector::start() {
  end_ns_ = world_.scheduler.now_ns() + world_.options.duration_ns;
  plan_next();
}

void Injector::plan_next() {
  const double gap = -std::log(1 - random_.unit()) * static_cast<double>(options_.fault_gap_ns);
  const int64_t when = world_.scheduler.now_ns() + static_cast<int64_t>(gap);
  if (when >= end_ns_) {
    world_.scheduler.at(end_ns_, [this] { is_over_ = true; });
    return;
  }
  world_.scheduler.at(when, [this] {
    const auto worker = static_cast<uint32_t>(random_.below(world_.num_remote()));
    inject(worker, random_.one_of(options_.faults));
    plan_next();
  });
}

bool Injector::is_quiet() const {
  if (!is_over_ || num_removed_ > 0 || is_stopped_ || is_flooding_ || dies_ || busy_ns_ > 0)
    return false;
  return std::ranges::all_of(host_.workers,
                             [](const WorkerOfHost& worker) { return worker.num_faults == 0; });
}

void Injector::inject(uint32_t worker, SimulatedFault kind) {
  WorkerProcess& process = world_.workers[worker].process();
  if (kind == SimulatedFault::kAbandon) {
    ++world_.num_faults[static_cast<size_t>(kind)];
    ++num_abandons_;
    return;
  }
  if (kind == SimulatedFault::kBusy) {
    ++world_.num_faults[static_cast<size_t>(kind)];
    busy_ns_ = random_.magnitude(10 * kMs, 10 * kS);
    return;
  }
  if (kind == SimulatedFault::kStop) return stop_host();
  if (kind == SimulatedFault::kFlood) return flood();
  if (kind == SimulatedFault::kDie) {
    dies_ = true;
    return;
  }
  if (!process.is_alive()) return;
  switch (kind) {
    case SimulatedFault::kKill: return kill(worker, kind, world_.options.restart_ns);
    case SimulatedFault::kUnfit:
      for (HostRecord& host : world_.hosts) host.workers[worker].is_unfit = true;
      return kill(worker, kind, world_.options.restart_ns);
    case SimulatedFault::kCrashLoop: {
      const int64_t duration = random_.magnitude(100 * kMs, 8 * kS);
      world_.workers[worker].crashes_until_ns = world_.scheduler.now_ns() + duration;
      return kill(worker, kind, duration);
    }
    case SimulatedFault::kRemove:      return remove(worker);
    case SimulatedFault::kFreeze:      return freeze(worker);
    case SimulatedFault::kHang:        return hang(worker);
    case SimulatedFault::kMute:        return mute(worker);
    case SimulatedFault::kStuck:       return get_stuck(worker);
    case SimulatedFault::kRefuse:
    case SimulatedFault::kRefuseRange: return refuse(worker, kind);
    case SimulatedFault::kCutOff:
    case SimulatedFault::kCutToWorker:
    case SimulatedFault::kCutToHost:   return cut(worker, kind);
    case SimulatedFault::kSlow:
      process.experts().slowdown = static_cast<double>(random_.magnitude(2, 1000));
      return undo_after(worker, kind, random_.magnitude(10 * kMs, 10 * kS),
                        [](WorkerProcess& one) { one.experts().slowdown = 1; });
    case SimulatedFault::kLosePulses:
      process.set_losing_pulses(true);
      return undo_after(worker, kind, random_.magnitude(100 * kMs, 5 * kS),
                        [](WorkerProcess& one) { one.set_losing_pulses(false); });
    case SimulatedFault::kDelay: {
      Network& network = link_to(worker).network;
      network.added_delay_ns = random_.magnitude(kMs, 500 * kMs);
      const int64_t duration = random_.magnitude(10 * kMs, 10 * kS);
      begin(worker, kind, duration);
      world_.scheduler.after(duration, [this, worker, kind] {
        link_to(worker).network.added_delay_ns = 0;
        end(worker, kind);
      });
      return;
    }
    default: return damage(worker, kind);
  }
}

void Injector::undo_after(uint32_t worker, SimulatedFault kind, int64_t duration_ns,
                          std::function<void(WorkerProcess&)> undo) {
  begin(worker, kind, duration_ns);
  WorkerProcess* const process = &world_.workers[worker].process();
  world_.scheduler.after(duration_ns, [this, worker, kind, process, undo = std::move(undo)] {
    if (process->is_alive()) undo(*process);
    end(worker, kind);
  });
}

// A process that the host started is started again by the host, when its state machine says so;
// another one by somebody else.
void Injector::kill(uint32_t worker, SimulatedFault kind, int64_t duration_ns) {
  begin(worker, kind, duration_ns);
  for (uint32_t host = 0; host < world_.hosts.size(); ++host)
    world_.set_attached(host, worker, false);
  world_.workers[worker].process().kill(random_.chance(0.5));
  world_.scheduler.after(duration_ns, [this, worker, kind] {
    if (!world_.options.workers[worker].is_started_by_host) world_.start_process(worker);
    end(worker, kind);
  });
}

void Injector::remove(uint32_t worker) {
  const int64_t duration = random_.magnitude(100 * kMs, 8 * kS);
  ++world_.num_faults[static_cast<size_t>(SimulatedFault::kRemove)];
  world_.record(JournalEvent::kFault, world_.label(index_, worker),
                static_cast<uint64_t>(SimulatedFault::kRemove),
                static_cast<uint64_t>(duration / kMs));
  ++num_removed_;
  changes_.push_back({worker, true});
  world_.scheduler.after(duration, [this, worker] {
    --num_removed_;
    changes_.push_back({worker, false});
    world_.record(JournalEvent::kHeal, world_.label(index_, worker),
                  static_cast<uint64_t>(SimulatedFault::kRemove));
  });
}

void Injector::freeze(uint32_t worker) {
  WorkerProcess& process = world_.workers[worker].process();
  if (process.is_frozen()) return;
  process.freeze();
  undo_after(worker, SimulatedFault::kFreeze, random_.magnitude(10 * kMs, 10 * kS),
             [](WorkerProcess& one) { one.thaw(); });
}

void Injector::end_once(uint32_t worker, SimulatedFault kind, std::function<bool()> is_over) {
  if (is_over()) return end(worker, kind);
  world_.scheduler.after(kLookNs, [this, worker, kind, is_over = std::move(is_over)] {
    end_once(worker, kind, is_over);
  });
}

void Injector::hang(uint32_t worker) {
  WorkerProcess& process = world_.workers[worker].process();
  if (!world_.options.workers[worker].is_started_by_host) return freeze(worker);
  WorkerSession& session = process.session(index_);
  if (process.is_frozen() || session.link() == nullptr) return;
  process.freeze();
  begin(worker, SimulatedFault::kHang, 0);
  const std::shared_ptr<SimulatedLink> link = session.shared_link();
  const Options& options = world_.options;
  // Where calls have less time, it is found out by its silence.
  if (options.call_timeout_ns > kMostStalls * options.stall_timeout_ns) {
    host_.expected_losses.add(
        {"worker " + std::to_string(worker) + " stands still",
         [&process, link] { return !process.is_frozen() || link->is_closed(Side::kHost); },
         [link] { return link->owes(); },
         [&options] { return kMostStalls * options.stall_timeout_ns + kS; }});
  }
  // One that nobody asks for anything is missed by nobody.
  const int64_t until = world_.scheduler.now_ns() + random_.magnitude(kS, 10 * kS);
  end_once(worker, SimulatedFault::kHang, [this, &process, &session, until] {
    const bool is_missed = session.link()->owes();
    if (process.is_alive() && !is_missed && world_.scheduler.now_ns() >= until) process.thaw();
    return !process.is_alive() || !process.is_frozen();
  });
}

void Injector::mute(uint32_t worker) {
  Network& network = link_to(worker).network;
  if (network.is_mute || session(worker).link() == nullptr) return;
  network.is_mute = true;
  const bool is_own = world_.options.workers[worker].is_started_by_host;
  const int64_t until =
      world_.scheduler.now_ns() + (is_own ? kDamagePatienceNs : random_.magnitude(kS, 10 * kS));
  begin(worker, SimulatedFault::kMute, 0);
  // Whether an answer was swallowed on the present path.
  const auto is_struck = [this, worker] {
    const SimulatedLink* const link = session(worker).link();
    return link != nullptr && link->is_stuck(Side::kWorker) && !link->is_closed(Side::kHost);
  };
  world_.expect_loss_of_silent(
      index_, worker, "is mute", [&network, is_struck] { return !network.is_mute && !is_struck(); },
      is_struck);
  end_once(worker, SimulatedFault::kMute, [this, &network, is_struck, is_own, until] {
    // The worker itself is mute for good once it has swallowed an answer.
    if (world_.scheduler.now_ns() >= until && !(is_own && is_struck())) network.is_mute = false;
    return !network.is_mute && !is_struck();
  });
}

void Injector::get_stuck(uint32_t worker) {
  const std::shared_ptr<SimulatedLink> link = session(worker).shared_link();
  if (link == nullptr || link->is_closed(Side::kWorker)) return;
  const Side side = random_.chance(0.3) ? Side::kHost : Side::kWorker;
  link->damage_next(side, SimulatedFault::kStuck);
  const int64_t until = world_.scheduler.now_ns() + kDamagePatienceNs;
  begin(worker, SimulatedFault::kStuck, 0);
  world_.expect_loss_of_silent(
      index_, worker, "has a path that is stuck",
      [this, link, side, until] {
        return link->is_closed(Side::kHost) ||
               (!link->is_stuck(side) && world_.scheduler.now_ns() > until);
      },
      [link, side] { return link->is_stuck(side) && link->owes(); });
  end_once(worker, SimulatedFault::kStuck, [this, link, side, until] {
    if (link->is_stuck(side)) return link->is_closed(Side::kHost);
    if (world_.scheduler.now_ns() < until) return false;
    link->spare_next(side);
    return true;
  });
}

// Nobody looks meanwhile, and workers that share its terminal do nothing either.
void Injector::stop_host() {
  if (is_stopped_) return;
  is_stopped_ = true;
  const int64_t duration = random_.magnitude(10 * kMs, 10 * kS);
  ++world_.num_faults[static_cast<size_t>(SimulatedFault::kStop)];
  world_.record(JournalEvent::kFault, world_.label(index_, 0),
                static_cast<uint64_t>(SimulatedFault::kStop),
                static_cast<uint64_t>(duration / kMs));
  std::vector<WorkerProcess*> stopped;
  const bool stops_workers = random_.chance(0.5);
  for (uint32_t worker = 0; stops_workers && worker < world_.num_remote(); ++worker) {
    WorkerProcess& process = world_.workers[worker].process();
    const bool is_own = world_.options.workers[worker].is_started_by_host;
    if (!is_own || !process.is_alive() || process.is_frozen()) continue;
    process.freeze();
    stopped.push_back(&process);
  }
  host_.task->freeze();
  world_.scheduler.after(duration, [this, duration, stopped] {
    for (WorkerProcess* process : stopped) {
      if (process->is_alive()) process->thaw();
    }
    is_stopped_ = false;
    host_.away_ns += duration;
    on_continued(duration);
    host_.task->thaw();
  });
}

void Injector::flood() {
  if (std::exchange(is_flooding_, true)) return;
  const int64_t duration = random_.magnitude(10 * kMs, 2 * kS);
  ++world_.num_faults[static_cast<size_t>(SimulatedFault::kFlood)];
  world_.record(JournalEvent::kFault, world_.label(index_, 0),
                static_cast<uint64_t>(SimulatedFault::kFlood),
                static_cast<uint64_t>(duration / kMs));
  world_.scheduler.after(duration, [this] { is_flooding_ = false; });
}

void Injector::refuse(uint32_t worker, SimulatedFault kind) {
  const ErrorCode code =
      kind == SimulatedFault::kRefuseRange ? ErrorCode::kRange : random_.one_of(kRefusals);
  world_.workers[worker].process().experts().next_refusal = Error{code, "a refusal on purpose"};
  undo_after(worker, kind, kDamagePatienceNs,
             [](WorkerProcess& one) { one.experts().next_refusal.reset(); });
}

void Injector::cut(uint32_t worker, SimulatedFault kind) {
  Network& network = link_to(worker).network;
  const int64_t duration = random_.magnitude(10 * kMs, 10 * kS);
  const int64_t until = world_.scheduler.now_ns() + duration;
  for (const Side from : {Side::kHost, Side::kWorker}) {
    const SimulatedFault spares =
        from == Side::kHost ? SimulatedFault::kCutToHost : SimulatedFault::kCutToWorker;
    int64_t& cut_until = network.cut_until_ns[static_cast<size_t>(from)];
    if (kind != spares) cut_until = std::max(cut_until, until);
  }
  begin(worker, kind, duration);
  world_.scheduler.after(duration, [this, worker, kind] { end(worker, kind); });
}

void Injector::damage(uint32_t worker, SimulatedFault kind) {
  SimulatedLink* const link = session(worker).link();
  if (link == nullptr || link->is_closed(Side::kWorker)) return;
  const Side side = random_.chance(0.3) ? Side::kHost : Side::kWorker;
  link->damage_next(side, kind);
  undo_after(worker, kind, kDamagePatienceNs, [this, side](WorkerProcess& one) {
    SimulatedLink* const present = one.session(index_).link();
    if (present != nullptr) present->spare_next(side);
  });
}

}  // namespace dflash::simulation
