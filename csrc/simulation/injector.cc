// The faults by kind.
// SPDX-License-Identifier: Apache-2.0
#include "simulation/injector.h"

#include <cmath>

namespace dflash::simulation {

using transport::Side;

namespace {

constexpr int64_t kMs = 1'000'000, kS = 1'000'000'000;
// For how long a message may be waited for that is to be damaged.
constexpr int64_t kDamagePatienceNs = 2 * kS;

constexpr ErrorCode kRefusals[] = {ErrorCode::kInvalidArgument, ErrorCode::kProtocol,
                                   ErrorCode::kOutOfMemory, ErrorCode::kSystem};

}  // namespace

void Injector::start() {
  end_ns_ = world_.scheduler.now_ns() + world_.options.duration_ns;
  plan_next();
}

void Injector::plan_next() {
  const double gap =
      -std::log(1 - random_.unit()) * static_cast<double>(world_.options.fault_gap_ns);
  const int64_t when = world_.scheduler.now_ns() + static_cast<int64_t>(gap);
  if (when >= end_ns_) {
    world_.scheduler.at(end_ns_, [this] { is_over_ = true; });
    return;
  }
  world_.scheduler.at(when, [this] {
    const auto worker = static_cast<uint32_t>(random_.below(world_.num_remote()));
    inject(worker, random_.one_of(world_.options.faults));
    plan_next();
  });
}

bool Injector::is_quiet() const {
  if (!is_over_ || num_removed_ > 0) return false;
  for (const Member& member : world_.members) {
    if (member.num_faults > 0) return false;
  }
  return true;
}

void Injector::inject(uint32_t worker, FaultKind kind) {
  WorkerProcess& process = world_.members[worker].process();
  if (kind == FaultKind::kAbandon) {
    ++world_.num_faults[static_cast<size_t>(kind)];
    ++num_abandons_;
    return;
  }
  if (!process.is_alive()) return;
  switch (kind) {
    case FaultKind::kKill: return kill(worker, kind, world_.options.restart_ns);
    case FaultKind::kUnfit:
      world_.members[worker].is_unfit = true;
      return kill(worker, kind, world_.options.restart_ns);
    case FaultKind::kCrashLoop: {
      const int64_t duration = random_.magnitude(100 * kMs, 8 * kS);
      world_.members[worker].crashes_until_ns = world_.scheduler.now_ns() + duration;
      return kill(worker, kind, duration);
    }
    case FaultKind::kRemove:      return remove(worker);
    case FaultKind::kFreeze:      return freeze(worker);
    case FaultKind::kRefuse:
    case FaultKind::kRefuseRange: return refuse(worker, kind);
    case FaultKind::kCutOff:
    case FaultKind::kCutToWorker:
    case FaultKind::kCutToHost:   return cut(worker, kind);
    case FaultKind::kSlow:
      process.experts().slowdown = static_cast<double>(random_.magnitude(2, 1000));
      return undo_after(worker, kind, random_.magnitude(10 * kMs, 10 * kS),
                        [](WorkerProcess& one) { one.experts().slowdown = 1; });
    case FaultKind::kLosePulses:
      process.set_losing_pulses(true);
      return undo_after(worker, kind, random_.magnitude(100 * kMs, 5 * kS),
                        [](WorkerProcess& one) { one.set_losing_pulses(false); });
    case FaultKind::kDelay: {
      Network& network = world_.members[worker].network;
      network.added_delay_ns = random_.magnitude(kMs, 500 * kMs);
      const int64_t duration = random_.magnitude(10 * kMs, 10 * kS);
      world_.begin_fault(worker, kind, duration);
      world_.scheduler.after(duration, [this, worker, kind] {
        world_.members[worker].network.added_delay_ns = 0;
        world_.end_fault(worker, kind);
      });
      return;
    }
    default: return damage(worker, kind);
  }
}

void Injector::undo_after(uint32_t worker, FaultKind kind, int64_t duration_ns,
                          std::function<void(WorkerProcess&)> undo) {
  world_.begin_fault(worker, kind, duration_ns);
  WorkerProcess* const process = &world_.members[worker].process();
  world_.scheduler.after(duration_ns, [this, worker, kind, process, undo = std::move(undo)] {
    if (process->is_alive()) undo(*process);
    world_.end_fault(worker, kind);
  });
}

// A process that the host started is started again by the host, when its state machine says so;
// another one by somebody else.
void Injector::kill(uint32_t worker, FaultKind kind, int64_t duration_ns) {
  world_.begin_fault(worker, kind, duration_ns);
  world_.set_attached(worker, false);
  world_.members[worker].process().kill(random_.chance(0.5));
  world_.scheduler.after(duration_ns, [this, worker, kind] {
    if (!world_.options.workers[worker].is_started_by_host) world_.start_process(worker);
    world_.end_fault(worker, kind);
  });
}

void Injector::remove(uint32_t worker) {
  const int64_t duration = random_.magnitude(100 * kMs, 8 * kS);
  ++world_.num_faults[static_cast<size_t>(FaultKind::kRemove)];
  world_.record(EventKind::kFault, worker, static_cast<uint64_t>(FaultKind::kRemove),
                static_cast<uint64_t>(duration / kMs));
  ++num_removed_;
  changes_.push_back({worker, true});
  world_.scheduler.after(duration, [this, worker] {
    --num_removed_;
    changes_.push_back({worker, false});
    world_.record(EventKind::kHeal, worker, static_cast<uint64_t>(FaultKind::kRemove));
  });
}

void Injector::freeze(uint32_t worker) {
  WorkerProcess& process = world_.members[worker].process();
  if (process.is_frozen()) return;
  process.freeze();
  undo_after(worker, FaultKind::kFreeze, random_.magnitude(10 * kMs, 10 * kS),
             [](WorkerProcess& one) { one.thaw(); });
}

void Injector::refuse(uint32_t worker, FaultKind kind) {
  const ErrorCode code =
      kind == FaultKind::kRefuseRange ? ErrorCode::kRange : random_.one_of(kRefusals);
  world_.members[worker].process().experts().next_refusal = Error{code, "a refusal on purpose"};
  undo_after(worker, kind, kDamagePatienceNs,
             [](WorkerProcess& one) { one.experts().next_refusal.reset(); });
}

void Injector::cut(uint32_t worker, FaultKind kind) {
  Network& network = world_.members[worker].network;
  const int64_t duration = random_.magnitude(10 * kMs, 10 * kS);
  const int64_t until = world_.scheduler.now_ns() + duration;
  for (const Side from : {Side::kHost, Side::kWorker}) {
    const FaultKind spares = from == Side::kHost ? FaultKind::kCutToHost : FaultKind::kCutToWorker;
    int64_t& cut_until = network.cut_until_ns[static_cast<size_t>(from)];
    if (kind != spares) cut_until = std::max(cut_until, until);
  }
  world_.begin_fault(worker, kind, duration);
  world_.scheduler.after(duration, [this, worker, kind] { world_.end_fault(worker, kind); });
}

void Injector::damage(uint32_t worker, FaultKind kind) {
  Link* const link = world_.members[worker].process().link();
  if (link == nullptr || link->is_closed(Side::kWorker)) return;
  const Side side = random_.chance(0.3) ? Side::kHost : Side::kWorker;
  link->damage_next(side, kind);
  undo_after(worker, kind, kDamagePatienceNs, [side](WorkerProcess& one) {
    if (one.link() != nullptr) one.link()->spare_next(side);
  });
}

}  // namespace dflash::simulation
